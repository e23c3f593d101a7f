"""A run that is asked to stop finishes its step, saves itself, says how it left, and goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.faults.stop import Stop
from pipeline.metrics.journal import read_rows
from tests.conftest import entry_point, launch, losses, tiny_config, write_config

STEPS = 40
SLOW = {"evaluation": {"every": 10, "samples": 4000}}
"""An evaluation that takes seconds."""


@pytest.fixture(scope="module")
def uninterrupted(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes that nobody touched."""
    work = tmp_path_factory.mktemp("whole")
    launch("train.py", configured(tokens, work), processes=2)
    return work / "run"


def configured(tokens: Path, work: Path, **fields: object) -> Path:
    run = {"dir": str(work / "run"), "steps": STEPS, "seed": 7, "checkpoint_every": 15}
    return write_config(work / "c.json", tiny_config(tokens, work / "run", engine="torch", run=run, **fields))


def asked_at_step(config: Path, run_dir: Path, step: int, which: signal.Signals, *, processes: int) -> tuple[int, str]:
    """Starts a run, sends its launcher a signal once a step is done, and returns the exit code and what was said."""
    words = entry_point("train.py", config)
    command = [sys.executable, words[0], *(["--nproc", str(processes)] if processes > 1 else []), *words[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and step not in (losses(run_dir) if (run_dir / "metrics.jsonl").exists() else {}):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(which)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize(
    ("which", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)], ids=["TERM", "USR1", "INT"]
)
def test_a_run_that_is_asked_to_stop_saves_itself_and_goes_on_to_the_same_curve(
    uninterrupted: Path, tokens: Path, tmp_path: Path, which: signal.Signals, code: int
) -> None:
    config, run_dir = configured(tokens, tmp_path), tmp_path / "run"
    left, said = asked_at_step(config, run_dir, 4, which, processes=2)
    assert left == code, said
    assert "start it again to go on" in said
    assert "Traceback" not in said
    done = max(losses(run_dir))
    assert 4 <= done < STEPS
    assert (run_dir / f"checkpoints/step-{done:08d}/manifest.json").exists()
    assert f"resuming after step {done}" in launch("train.py", config, processes=2)
    assert losses(run_dir) == losses(uninterrupted)  # to the last bit


def test_a_run_that_is_asked_to_stop_in_an_evaluation_ends_it_and_makes_it_later(tokens: Path, tmp_path: Path) -> None:
    config, run_dir = configured(tokens, tmp_path, **SLOW), tmp_path / "run"
    left, said = asked_at_step(config, run_dir, 10, signal.SIGTERM, processes=1)
    assert left == 75, said
    assert read_rows(run_dir, kind="eval") == []  # half a measurement is none
    launch("train.py", config, "run.steps=12", "evaluation.samples=16", 'run.allow_change=["scheduler"]')
    assert [row["step"] for row in read_rows(run_dir, kind="eval")] == [10, 12]


def test_a_run_that_is_asked_to_stop_while_it_starts_does_no_step_and_builds_no_engine(
    tokens: Path, tmp_path: Path
) -> None:
    config, run_dir = configured(tokens, tmp_path), tmp_path / "run"
    words = [*entry_point("train.py", config), "--nproc", "2"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (run_dir / ".lock").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "stopped by SIGTERM before it had begun: start it again to go on" in said
    assert not (run_dir / "metrics.jsonl").exists()


PRINTS = """
import sys
from pipeline.faults.stop import StopSignals
with StopSignals(tells=True) as signals:
    sys.stderr.write("x" * 1_000_000)
sys.exit(signals.asked.exit_code)
"""


def test_a_signal_that_comes_while_the_main_thread_prints_is_noted_like_any_other() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # which hides it
    process = subprocess.Popen([sys.executable, "-c", PRINTS], stderr=subprocess.PIPE, env=env)
    process.stderr.read(1)  # it prints, and waits for this end to read
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 75, said[-2000:]
    assert "SIGTERM: the step is finished and saved first" in said


def test_of_several_reasons_to_stop_the_one_that_asks_for_a_restart_counts() -> None:
    assert max(Stop.INTERRUPT, Stop.TERMINATE).exit_code == 75
    assert Stop.NO.exit_code == 0
