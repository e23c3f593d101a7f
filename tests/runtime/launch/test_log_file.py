"""Logs are rotated by the ranks whose output they are, and only what this project has opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.runtime.launch.log_file import LOG_FILE, rotate_log
from pipeline.runtime.launch.rank_process import start_process, start_rank
from tests.conftest import tiny_config, write_config

_IMPORT = "from pipeline.runtime.launch.log_file import rotate_log"
_WRITER = """
import os, subprocess, sys
from pipeline.runtime.launch.log_file import rotate_log

child = subprocess.Popen(["sh", "-c", "read line; echo child $line"], stdin=subprocess.PIPE)
for number in range(2000):
    print(f"line {number:04}", flush=True)
    rotate_log(limit=9000)
child.communicate(b"goes on\\n")
print("error", file=sys.stderr)
"""


def test_a_rank_keeps_the_end_of_its_log_and_what_was_before_and_its_children_go_on(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("of an earlier start\n")
    rank = start_rank([sys.executable, "-c", _WRITER], 1, environ=os.environ, output=log, error=tmp_path / "error")
    assert rank.process.wait() == 0
    lines = [*(tmp_path / "rank-1.log.1").read_text().splitlines(), *log.read_text().splitlines()]
    assert lines[-2:] == ["child goes on", "error"]
    kept = [int(line.removeprefix("line ")) for line in lines[:-2]]
    assert kept == list(range(kept[0], 2000)), "a line was lost"
    assert 900 < len(kept) < 1900
    assert not list(tmp_path.glob("*.new"))


def test_a_log_that_somebody_else_has_opened_is_left_alone(tmp_path: Path) -> None:
    mine, other = tmp_path / "rank-1.log", tmp_path / "of-a-shell.log"
    mine.write_text("x" * 100)
    code = f"{_IMPORT}; print('y' * 100, flush=True); assert not rotate_log(limit=9)"
    for how in (">>", ">"):
        environ = {**os.environ, LOG_FILE: str(other if how == ">" else mine)}
        command = f'"{sys.executable}" -c "{code}" {how} {other}'
        subprocess.run(command, shell=True, check=True, env=environ)
    assert len(other.read_text()) == 101
    assert len(mine.read_text()) == 100
    assert not list(tmp_path.glob("*.1"))


def test_a_log_that_cannot_be_copied_stays_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-1.log"
    log.parent.mkdir()
    log.with_name("rank-1.log.1.new").mkdir()  # as a full disk: the copy cannot be written
    code = f"{_IMPORT}; print('y' * 99, flush=True); print(rotate_log(limit=9))"
    environ = {**os.environ, LOG_FILE: str(log)}
    assert start_process([sys.executable, "-c", code], environ=environ, output=log).wait() == 0
    assert log.read_text() == f"{'y' * 99}\nFalse\n"


def test_without_a_log_nothing_is_done() -> None:
    assert not rotate_log({}, limit=0)


@pytest.mark.sweep
def test_a_training_run_rotates_the_log_of_a_rank(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"a warning\n" * 2_000_000)
    command = [sys.executable, "-m", "pipeline.train", "--config", str(config)]
    rank = start_rank(command, 0, environ=os.environ, output=log, error=tmp_path / "error")
    assert rank.process.wait() == 0, rank.error_text()
    assert log.with_name("rank-0.log.1").stat().st_size >= 20_000_000
    assert log.stat().st_size < 100_000
    assert "step" in log.read_text()
