"""A run is checkpointed unless told otherwise, by the clock of one rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.sections.run import RunSection
from pipeline.run.checkpoint_timer import DEFAULT_MINUTES, CheckpointTimer
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import ROOT, launch, tiny_config, write_config

KILLED = """
import os, runpy, signal, sys
from pipeline.engines.torch_native.single import TorchSingle
def killed(*_): os.kill(os.getpid(), signal.SIGKILL)
TorchSingle.evaluate = killed
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_module("pipeline.train", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("fields", "minutes"),
    [
        ({}, DEFAULT_MINUTES),
        ({"checkpoint_every": 100}, None),
        ({"checkpoint_minutes": 0.0}, None),
        ({"checkpoint_every": 100, "checkpoint_minutes": 5.0}, 5.0),
    ],
)
def test_minutes_between_checkpoints(fields: dict[str, float], minutes: float | None) -> None:
    now = [1000.0]
    section = RunSection(dir="x", steps=1, **fields)
    timer = CheckpointTimer(section, decides=True, clock=lambda: now[0])
    other = CheckpointTimer(section, decides=False, clock=lambda: now[0])
    now[0] += (minutes or 1e6) * 60 - 1
    assert not timer.due
    now[0] += 1
    assert timer.due is (minutes is not None)
    assert not other.due
    timer.restart()
    assert not timer.due


@pytest.mark.integration
def test_a_run_checkpoints_by_time_and_a_killed_last_evaluation_loses_nothing(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", zero_optimization={"stage": 0})
    del config["run"]["checkpoint_every"]
    path = write_config(tmp_path / "c.json", config)
    command = [sys.executable, "-c", KILLED, "--config", str(path), "--set", "run.checkpoint_minutes=0.0001"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == -signal.SIGKILL
    saved = [row["step"] for row in read_rows(tmp_path / "run", kind="event") if row["event"] == "checkpoint"]
    assert len(saved) > 2
    assert saved[-1] == 20
    assert "resuming after step 20" in launch("train.py", path)
    assert [row["step"] for row in read_rows(tmp_path / "run", kind="eval")] == [20]
