"""Stale locks of killed processes in the build directory are removed; locks of live processes are not."""

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
    """Starts a process that holds a lock as torch does while it compiles."""
    lock.parent.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", TAKE, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "taken\n"
    return holder


@pytest.mark.integration
def test_only_the_lock_of_a_killed_process_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale, held = tmp_path / "py311_cpu/stale/lock", tmp_path / "held/lock"
    killed, live = take(stale), take(held)
    killed.kill()
    killed.communicate()
    try:
        remove_stale_locks(tmp_path, old_s=0.0)
        assert not stale.exists()
        assert held.exists()
    finally:
        live.kill()
        live.communicate()
    assert f"removing {stale}" in capsys.readouterr().err


def test_a_lock_that_another_host_may_hold_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "op/lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(os, "major", lambda _device: 0)  # as on a network file system
    monkeypatch.setattr("pipeline.engines.deepspeed.operators.CONFIRM_S", 0.2)
    remove_stale_locks(tmp_path, old_s=2.0)
    output = capsys.readouterr().err
    assert not lock.exists()
    assert f"waiting for {lock}" in output
    assert "delete it" in output


def test_a_missing_build_directory_is_no_error(tmp_path: Path) -> None:
    remove_stale_locks(tmp_path / "none")
