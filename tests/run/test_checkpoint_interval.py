"""When a run is checkpointed: by the clock of one rank, and with "auto" at Daly's interval from measured saves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.training import check_checkpoints
from pipeline.config.sections.run import RunSection
from pipeline.run.checkpoint_interval import FIRST_S, AutoInterval, make_interval
from pipeline.run.checkpoint_timer import DEFAULT_MINUTES, CheckpointTimer
from pipeline.runtime.goodput.failures.model import HOUR, LLAMA_NODE_MTBF_S, daly_interval_s
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import ROOT, launch, tiny_config, write_config

KILLED = """
import os, runpy, signal, sys
from pipeline.engines.torch_native.parallel import TorchParallel
from pipeline.engines.torch_native.single import TorchSingle
def killed(*_): os.kill(os.getpid(), signal.SIGKILL)
TorchParallel.evaluate = TorchSingle.evaluate = killed
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_module("pipeline.train", run_name="__main__")
"""


def section(**fields: Any) -> RunSection:
    return RunSection(dir="x", steps=1, **fields)


def test_the_interval_is_dalys_for_all_nodes_and_never_shorter_than_a_save() -> None:
    interval = AutoInterval(node_mtbf_s=1000 * HOUR, nodes=100)
    assert interval.period_s == FIRST_S
    decision = interval.measured(blocking_s=2.0, save_s=30.0)
    assert decision.seconds == daly_interval_s(mtbf_s=10 * HOUR, blocking_s=2.0)  # 378 s
    assert interval.period_s == decision.seconds + 2.0
    slow = AutoInterval(node_mtbf_s=1000 * HOUR, nodes=100).measured(blocking_s=2.0, save_s=900.0)
    assert slow.seconds == 900.0


def test_the_interval_follows_the_median_of_the_newest_saves() -> None:
    interval = AutoInterval(node_mtbf_s=1000 * HOUR, nodes=100)
    assert interval.measured(blocking_s=40.0, save_s=0.0) is not None  # the first allocates
    # the mean of two, then 1 s
    decided = [interval.measured(blocking_s=1.0, save_s=0.0) for _ in range(6)]
    assert [each is not None for each in decided] == [True, True, False, False, False, False]
    assert decided[1] is not None
    assert decided[1].blocking_seconds == 1.0
    # a file system that has become slow counts once it is the rule
    slower = [interval.measured(blocking_s=9.0, save_s=0.0) for _ in range(3)]
    assert [each is not None for each in slower] == [False, False, True]


def test_the_default_is_the_published_rate_and_the_config_gives_another() -> None:
    published = make_interval(section(checkpoint_every="auto"), nodes=2)
    first = published.measured(blocking_s=1.0, save_s=0.0)
    assert first.mtbf_seconds == LLAMA_NODE_MTBF_S / 2
    given = make_interval(section(checkpoint_every="auto", node_mtbf_hours=10.0), nodes=1)
    second = given.measured(blocking_s=1.0, save_s=0.0)
    assert second.mtbf_seconds == 10 * HOUR
    assert make_interval(section(checkpoint_every=5), nodes=1) is None


def test_only_the_rank_that_decides_is_due_and_minutes_are_an_upper_bound() -> None:
    now = [0.0]
    auto = section(checkpoint_every="auto", checkpoint_minutes=2.0, node_mtbf_hours=1000.0)
    make = lambda decides: CheckpointTimer(  # noqa: E731
        auto, decides=decides, interval=make_interval(auto, nodes=1), clock=lambda: now[0]
    )
    timer, other = make(True), make(False)
    due = lambda: (timer.due, other.due)  # noqa: E731
    now[0] = FIRST_S
    assert due() == (True, False)
    timer.restart()
    assert other.saved(waited_s=1.0, seconds=2.0) is None
    decision = timer.saved(waited_s=1.0, seconds=2.0)
    assert decision.seconds > 2000  # Daly for 1,000 h and 1 s
    now[0] += 119.0
    assert due() == (False, False)
    now[0] += 1.0
    assert due() == (True, False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"node_mtbf_hours": 10.0}, "run.checkpoint_every auto"),
        ({"node_mtbf_hours": 10.0, "checkpoint_every": 5}, "run.checkpoint_every auto"),
        ({"checkpoint_every": "auto", "keep_every": 100}, "keep_every"),
    ],
)
def test_keys_that_have_no_meaning_beside_it_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_checkpoints(section(**fields))


def test_a_file_keeps_its_auto(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run")
    config["run"]["checkpoint_every"] = "auto"
    config["run"]["node_mtbf_hours"] = "auto"  # of other keys of ours it means the default
    found = load_config(write_config(tmp_path / "c.json", config)).run
    assert (found.checkpoint_every, found.node_mtbf_hours) == ("auto", None)


def _events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir, kind="event") if row["event"] == name]


@pytest.mark.sweep
def test_two_ranks_save_by_it_and_a_resumed_run_goes_on_with_what_was_measured(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", zero_optimization={"stage": 3})
    # a failure every 0.36 s on average: the shortest interval, 1 s, and bounded; the first save not after a minute
    config["run"] |= {"steps": 500, "checkpoint_every": "auto", "node_mtbf_hours": 1e-4, "checkpoint_minutes": 0.5 / 60}
    config["evaluation"] = {"every": 250}
    path = write_config(tmp_path / "c.json", config)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = [*torchrun, sys.executable, "-c", KILLED, "--config", str(path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode not in (0, 2)
    saves, decisions = _events(tmp_path / "run", "checkpoint"), _events(tmp_path / "run", "checkpoint_interval")
    assert len(saves) >= 2
    [first, *_] = decisions
    assert (first["nodes"], first["mtbf_seconds"]) == (1, pytest.approx(0.36))
    assert first["blocking_seconds"] == pytest.approx(saves[0]["waited_seconds"])
    assert first["seconds"] >= max(1.0, first["save_seconds"])
    # without the bound on the first save, and in less than its minute: saved by what was measured before
    output = launch("train.py", path, "run.checkpoint_minutes=0", processes=2, timeout=900)
    assert "resuming after step" in output
    later = [row["step"] for row in _events(tmp_path / "run", "checkpoint") if 250 < row["step"] < 500]
    assert later


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
