"""`headrace status` of a run of two ranks: while it trains, after a rank was killed with SIGKILL, after its resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.checkpoint.format.naming import finished_checkpoints
from pipeline.cluster.status.run import read_status
from pipeline.runtime.launch.run_lock import exclusive_run
from pipeline.runtime.metrics.attempts_journal import append_event, read_events
from pipeline.runtime.metrics.journal import Journal
from tests.conftest import ROOT, start, tiny_config, write_config
from tests.headrace.commands.test_app import run
from tests.support import last_step, wait_until


@pytest.mark.integration
def test_a_run_is_seen_while_it_trains_when_a_rank_dies_and_when_it_has_resumed(tokens: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fields = {"run": {"dir": str(run_dir), "steps": 300, "seed": 7, "checkpoint_every": 5}}
    config = write_config(tmp_path / "c.json", tiny_config(tokens, run_dir, **fields))
    ended: list[subprocess.CompletedProcess[str]] = []
    thread = threading.Thread(target=lambda: ended.append(start("train.py", config, processes=2)))
    thread.start()
    wait_until(lambda: last_step(run_dir) >= 8 and finished_checkpoints(run_dir))  # which are written beside the steps
    shown = run("status", run_dir)  # this process is none of the run's
    assert "training now" in shown
    assert "time left" in shown
    [first] = read_status(run_dir).attempts
    assert (first.ended, first.world_size, sorted(first.nodes.values())) == (None, 2, ["0-1"])

    os.kill(newest_pid(run_dir), signal.SIGKILL)  # rank 0, which writes the journal
    thread.join(timeout=300)
    assert ended[0].returncode != 0
    status = read_status(run_dir)
    assert status.training is False
    assert "rank 0 on" in status.attempts[0].reason
    assert "was killed or crashed" in status.attempts[0].reason
    reached, (saved, _) = status.step, finished_checkpoints(run_dir)[0]

    thread = threading.Thread(target=lambda: ended.append(start("train.py", config, processes=2)))
    thread.start()
    wait_until(lambda: last_step(run_dir) >= reached + 2)
    os.kill(newest_pid(run_dir), signal.SIGTERM)
    thread.join(timeout=300)
    status = read_status(run_dir)
    assert len(status.attempts) == 2
    assert status.attempts[0].reached == reached
    assert status.attempts[1].step == saved
    assert status.attempts[1].code == 75
    assert (status.newest.step, status.newest.damage) == (status.step, None)
    assert 0 < status.goodput.share < 1
    assert run("status", run_dir, "--reason").startswith("reason: stopped by SIGTERM, saved (exit code 75)")
    log = run("status", run_dir, "--log")
    places = [log.index(text) for text in ("attempt 1", "was killed or crashed", "attempt 2", "stopped by SIGTERM")]
    assert places == sorted(places)


def test_a_terminal_shows_a_run_that_trains_until_it_ends(tmp_path: Path) -> None:
    append_event(tmp_path, "start", attempt="a", world_size=1)
    journal = Journal(tmp_path, from_step=0)
    journal.write("step", 1, loss=5.0, seconds=1.0)
    ours, theirs = os.openpty()
    shown = b""
    with exclusive_run(tmp_path):
        command = [sys.executable, "-m", "headrace", "status", str(tmp_path)]
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
        process = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=ROOT, env=environ)
        os.close(theirs)
        while b"training now" not in shown:
            shown += os.read(ours, 4096)
        journal.write("step", 2, loss=4.25, seconds=1.0)
        while b"4.2500 nats/token" not in shown:
            shown += os.read(ours, 4096)
        assert process.poll() is None
    assert process.wait(timeout=120) == 0  # nothing trains any more
    os.close(ours)


def newest_pid(run_dir: Path) -> int:
    events, _ = read_events(run_dir)
    pid: int = [event["pid"] for event in events if event["event"] == "start"][-1]
    return pid
