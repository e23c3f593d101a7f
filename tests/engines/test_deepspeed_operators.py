"""A lock that a killed process left in the build directory is removed; one that is held is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.engines.deepspeed.operators import remove_stale_locks

TAKE = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("taken", flush=True)
time.sleep(600)
"""


def take(lock: Path) -> subprocess.Popen[str]:
    """A process that holds a lock as torch does while it compiles."""
    lock.parent.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", TAKE, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "taken\n"
    return holder


def test_a_killed_builds_lock_is_removed_and_a_living_ones_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, held = tmp_path / "py311_cpu/left/lock", tmp_path / "held/lock"
    killed, living = take(left), take(held)
    killed.kill()
    killed.communicate()
    try:
        remove_stale_locks(tmp_path, old_s=0.0)
        assert not left.exists()
        assert held.exists()
    finally:
        living.kill()
        living.communicate()
    assert f"removing {left}" in capsys.readouterr().err


def test_a_lock_that_another_host_may_hold_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "op/lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(os, "major", lambda _device: 0)  # as network file systems have it
    remove_stale_locks(tmp_path, old_s=2.0)
    said = capsys.readouterr().err
    assert not lock.exists()
    assert f"waiting for {lock}" in said
    assert "delete it" in said


def test_without_a_build_directory_there_is_nothing_to_do(tmp_path: Path) -> None:
    remove_stale_locks(tmp_path / "none")
