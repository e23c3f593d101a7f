"""Goodput of real runs: one that is killed twice and goes on, a rank that is suspended, a slow source of data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.goodput.account import Goodput, read_goodput
from pipeline.runtime.metrics.attempts_journal import read_events
from pipeline.runtime.metrics.journal import read_rows
from pipeline.runtime.metrics.times import seconds_of as seconds_or_none
from tests import warm
from tests.conftest import entry_point, tiny_config, write_config
from tests.headrace.commands.test_app import run as headrace
from tests.runtime.metrics.test_stragglers import SLOWED
from tests.support import last_step, output_of, wait_until

SEEN_S = 2.0
"""Until the watchdog has seen that a process is gone, on a busy machine; 0.01 to 0.04 s on a quiet one."""
CLOCK_S = 0.05
"""What two clocks may differ by: the journals have milliseconds, a process's start has ticks of 10 ms."""
FORKING_S = 2.0
"""Until a process that was asked for has begun, on a busy machine."""


def seconds_of(text: str) -> float:
    seconds = seconds_or_none(text)
    assert seconds is not None
    return seconds


def config_of(tokens: Path, work: Path, **run: Any) -> dict[str, Any]:
    config = tiny_config(tokens, work / "run", engine="torch", zero_optimization={"stage": 0}, scheduler=None)
    config["run"] |= run
    return config


def goodput_of(run_dir: Path) -> Goodput:
    goodput = read_goodput(run_dir, training=False)
    assert goodput is not None
    assert goodput.spent.wall == pytest.approx(goodput.wall, abs=1e-6)  # of 1.7e9 seconds since the epoch
    for each, after in zip(goodput.attempts, goodput.attempts[1:], strict=False):
        assert after.begin == each.end
    for each in goodput.attempts:
        assert min(asdict(each.spent).values()) >= 0
        assert each.spent.wall == pytest.approx(each.end - each.begin, abs=1e-6)
    return goodput


def kill_at_step(config: Path, run_dir: Path, step: int) -> tuple[float, float]:
    """Starts a run and kills it with SIGKILL after a step; the times of both, since the epoch."""
    began = time.time()
    process = subprocess.Popen([sys.executable, *entry_point("train.py", config)], stdout=subprocess.DEVNULL)
    wait_until(lambda: last_step(run_dir) >= step, process=process)
    os.kill(process.pid, signal.SIGKILL)
    killed = time.time()
    process.wait()
    return began, killed


@pytest.mark.sweep
def test_a_run_killed_twice_accounts_for_lost_steps_and_the_time_it_was_down(tokens: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = config_of(tokens, tmp_path, steps=60, checkpoint_every=10)
    config["evaluation"]["every"] = 20
    path = write_config(tmp_path / "c.json", config)
    began, first_kill = kill_at_step(path, run_dir, 17)
    before = [row for row in read_rows(run_dir) if row["kind"] == "step"]
    time.sleep(3.0)
    again, second_kill = kill_at_step(path, run_dir, 36)
    between = [row for row in read_rows(run_dir) if row["kind"] == "step"]
    kills, starts = (first_kill, second_kill), (began, again, time.time())
    command = [sys.executable, *entry_point("train.py", path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ended = time.time()
    assert done.returncode == 0, done.stderr[-3000:]

    goodput, rows = goodput_of(run_dir), read_rows(run_dir)
    spent = goodput.spent
    kept = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in kept] == list(range(1, 61))
    lost = [row for row in before if row["step"] > 10] + [row for row in between if row["step"] > 30]
    assert len(lost) >= 7 + 6
    # and the step that was under way, until the process beside the run saw that it was gone
    seen = [fault["time"] for fault in read_faults(run_dir)]
    assert [0 < after - killed + CLOCK_S < SEEN_S for after, killed in zip(seen, kills, strict=True)] == [True] * 2
    unfinished = sum(after - seconds_of(rows[-1]["time"]) for after, rows in zip(seen, (before, between), strict=True))
    assert spent.lost == pytest.approx(sum(row["seconds"] for row in lost) + unfinished, abs=2 * CLOCK_S)
    assert spent.productive + spent.data_wait == pytest.approx(sum(row["seconds"] for row in kept), abs=1e-6)
    assert spent.data_wait == pytest.approx(sum(row["data_wait_seconds"] for row in kept), abs=1e-6)
    assert spent.evaluation == pytest.approx(sum(row["seconds"] for row in rows if row["kind"] == "eval"), abs=1e-6)

    begun = [event["process_start"] for event in read_events(run_dir)[0] if event["event"] == "start"]
    down = sum(seconds_of(start) - after for start, after in zip(begun[1:], seen, strict=True))
    assert spent.down == pytest.approx(down, abs=2 * CLOCK_S)
    asked = [0 < seconds_of(start) - time + CLOCK_S < FORKING_S for start, time in zip(begun, starts, strict=True)]
    assert asked == [True] * 3
    assert spent.down > 3.0 - SEEN_S
    assert began - CLOCK_S <= goodput.attempts[0].begin <= began + FORKING_S
    assert goodput.wall == pytest.approx(ended - began, abs=2 * FORKING_S)
    assert spent.startup > 0
    assert spent.checkpoint > 0
    assert spent.other < 0.1 * goodput.wall

    check_that_all_say_the_same(run_dir, goodput, done.stderr)


def check_that_all_say_the_same(run_dir: Path, goodput: Goodput, output: str) -> None:
    """The line at the end of a run of three attempts, its journal and `headrace status`."""
    spent = goodput.spent
    said = next(line for line in output.splitlines() if line.startswith("goodput "))
    [event] = [event for event in read_events(run_dir)[0] if event["event"] == "goodput"]
    assert f"goodput {100 * event['share']:.1f} % of " in said
    assert "in 3 attempts: " in said
    assert event["lost"] == pytest.approx(spent.lost, abs=1e-6)
    shown = json.loads(headrace("status", run_dir, "--json"))["goodput"]
    assert shown["lost"] == pytest.approx(spent.lost, abs=1e-6)
    assert shown["share"] == pytest.approx(goodput.share)
    assert [each["spent"]["lost"] > 0 for each in shown["attempts"]] == [True, True, False]
    assert f"goodput  {100 * goodput.share:.1f} % of " in headrace("status", run_dir)


@pytest.mark.integration
def test_a_suspended_rank_shows_as_stragglers(tokens: Path, tmp_path: Path) -> None:
    """Rank 1 is stopped (SIGSTOP) for three quarters of the time: the ranks wait for it in most of a step."""
    config = config_of(tokens, tmp_path, steps=24, checkpoint_every=24) | {"stragglers": {"every": 2}}
    config |= {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 64}  # computing is most of a step
    words = entry_point("train.py", write_config(tmp_path / "c.json", config))
    output_of(warm.run("-c", SLOWED, 1, *words, cwd=tmp_path, processes=2, merged=True))
    spent = goodput_of(tmp_path / "run").spent
    # how much it is without a slow rank depends on the machine: cores that are shared make stragglers, too
    assert spent.stragglers > 0.2 * (spent.productive + spent.stragglers), spent


SLOW_DATA = """
import runpy, sys, time
from pipeline.data.dataset import TokenDataset
rows = TokenDataset.rows
def slow(self, windows):  # as from a file system that reads 20 samples per second
    time.sleep(0.05 * len(windows))
    return rows(self, windows)
TokenDataset.rows = slow
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_slow_source_of_data_shows_as_data_wait(tokens: Path, tmp_path: Path) -> None:
    words = entry_point("train.py", write_config(tmp_path / "c.json", config_of(tokens, tmp_path, steps=20)))
    output_of(warm.run("-c", SLOW_DATA, *words, merged=True))
    spent = goodput_of(tmp_path / "run").spent
    reading_s = 0.05 * 8 * 20  # of which only what computing does not hide is waited for
    hidden_s = spent.productive + spent.checkpoint + spent.evaluation
    assert spent.data_wait > max(2.0, reading_s - hidden_s), spent
