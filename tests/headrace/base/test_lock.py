"""A lock file excludes other processes, lets them wait, and ends with the process that holds it."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.base.lock import LockedError, lock_file
from tests.conftest import ROOT

HOLD = """
import sys, time
from pathlib import Path
from headrace.base.lock import lock_file
with lock_file(Path(sys.argv[1]), doing="holding it", shared=sys.argv[2] == "shared"):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path, how: str = "alone") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path), how]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_held_lock_is_refused_at_once_after_a_time_or_waited_for_until_its_process_is_killed(tmp_path: Path) -> None:
    path, waited = tmp_path / "lock", []
    process = holder(path)
    try:
        with pytest.raises(LockedError, match="another process is working in x"), lock_file(path, doing="working in x"):
            pass
        began = time.monotonic()
        with pytest.raises(LockedError), lock_file(path, doing="", timeout_s=0.3, wait=lambda: waited.append(0)):
            pass
        assert time.monotonic() - began >= 0.3
        assert waited

        def kill_it() -> None:
            waited.append(1)
            process.kill()

        with lock_file(path, doing="", timeout_s=math.inf, wait=kill_it):
            assert 1 in waited
    finally:
        process.kill()
        process.communicate()


def test_shared_holders_exclude_only_those_who_want_it_alone(tmp_path: Path) -> None:
    process = holder(tmp_path / "lock", "shared")
    try:
        with lock_file(tmp_path / "lock", doing="", shared=True):
            pass
        with pytest.raises(LockedError), lock_file(tmp_path / "lock", doing="reading"):
            pass
    finally:
        process.kill()
        process.communicate()


def test_an_error_while_waiting_lets_go_of_the_file(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    process = holder(tmp_path / "lock")
    try:
        with pytest.raises(KeyboardInterrupt), lock_file(tmp_path / "lock", doing="", timeout_s=math.inf, wait=stop):
            pass
    finally:
        process.kill()
        process.communicate()
    with lock_file(tmp_path / "lock", doing=""):
        pass
