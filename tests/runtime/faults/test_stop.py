"""Graceful stop: on a signal a run finishes its step, saves a checkpoint and exits with a code; it resumes exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.runtime.faults.stop_signals import Stop
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import entry_point, launch, losses, tiny_config, write_config
from tests.support import last_step, wait_until

STEPS = 24
SLOW = {"evaluation": {"every": 10, "samples": 4000}}
"""An evaluation that takes seconds."""


@pytest.fixture(scope="module")
def uninterrupted(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("whole")
    launch("train.py", configured(tokens, work), processes=2)
    return work / "run"


def configured(tokens: Path, work: Path, **fields: object) -> Path:
    run = {"dir": str(work / "run"), "steps": STEPS, "seed": 7, "checkpoint_every": 15}
    return write_config(work / "c.json", tiny_config(tokens, work / "run", engine="torch", run=run, **fields))


def stopped_at_step(
    config: Path, run_dir: Path, step: int, number: signal.Signals, *, processes: int
) -> tuple[int, str]:
    words = entry_point("train.py", config)
    command = [sys.executable, words[0], *(["--nproc", str(processes)] if processes > 1 else []), *words[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent)
    wait_until(lambda: last_step(run_dir) >= step, process=process, said=lambda: process.communicate()[0])
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.mark.integration
def test_a_stopped_run_saves_a_checkpoint_and_resumes_to_the_same_loss_curve(
    uninterrupted: Path, tokens: Path, tmp_path: Path
) -> None:
    config, run_dir = configured(tokens, tmp_path), tmp_path / "run"
    exit_code, output = stopped_at_step(config, run_dir, 4, signal.SIGTERM, processes=2)
    assert exit_code == 75, output  # other signals: test_campaign.py
    assert "start it again to go on" in output
    assert "Traceback" not in output
    done = max(losses(run_dir))
    assert 4 <= done < STEPS
    assert (run_dir / f"checkpoints/step-{done:08d}/manifest.json").exists()
    assert f"resuming after step {done}" in launch("train.py", config, processes=2)
    assert losses(run_dir) == losses(uninterrupted)  # to the last bit


@pytest.mark.integration
def test_a_run_stopped_in_an_evaluation_aborts_it_and_repeats_it_on_resume(tokens: Path, tmp_path: Path) -> None:
    config, run_dir = configured(tokens, tmp_path, **SLOW), tmp_path / "run"
    exit_code, output = stopped_at_step(config, run_dir, 10, signal.SIGTERM, processes=1)
    assert exit_code == 75, output
    assert read_rows(run_dir, kind="eval") == []  # an aborted evaluation has no result
    launch("train.py", config, "run.steps=12", "evaluation.samples=16", 'run.allow_change=["scheduler"]')
    assert [row["step"] for row in read_rows(run_dir, kind="eval")] == [10, 12]


@pytest.mark.integration
def test_a_run_stopped_while_it_starts_does_no_step_and_builds_no_engine(tokens: Path, tmp_path: Path) -> None:
    config, run_dir = configured(tokens, tmp_path), tmp_path / "run"
    words = [*entry_point("train.py", config), "--nproc", "2"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until((run_dir / ".lock").exists, process=process, poll_s=0.001)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    assert "stopped by SIGTERM before it had begun: start it again to go on" in output
    assert not (run_dir / "metrics.jsonl").exists()


PRINTS = """
import sys
from pipeline.runtime.faults.stop_signals import StopSignals
with StopSignals(announce=True) as signals:
    sys.stderr.write("x" * 1_000_000)
sys.exit(signals.requested.exit_code)
"""


def test_a_signal_that_arrives_while_the_main_thread_prints_is_recorded_like_any_other() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # which hides it
    process = subprocess.Popen([sys.executable, "-c", PRINTS], stderr=subprocess.PIPE, env=env)
    process.stderr.read(1)  # it prints, and waits for this end to read
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    output = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 75, output[-2000:]
    assert "SIGTERM: the step is finished and saved first" in output


def test_of_several_stop_requests_the_one_that_asks_for_a_requeue_counts() -> None:
    assert max(Stop.INTERRUPT, Stop.TERMINATE).exit_code == 75
    assert Stop.NO.exit_code == 0
