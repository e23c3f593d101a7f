"""Leases, given back at any end (others: `tests/run/uploads`), and locks of files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from foundation import lease
from foundation.lock import LockedError, lock_file
from foundation.storage import StorageError
from tests.conftest import ROOT

PLACE = "s3://store/run"
HOLD = """
import sys, time
from pathlib import Path
from foundation.lock import lock_file
with lock_file(Path(sys.argv[1]), doing="holding it", shared=sys.argv[2] == "shared"):
    print("held", flush=True)
    time.sleep(60)
"""


class SlowStore:
    """A store with one lease, whose writes take a while.

    Attributes:
        lease: the lease last written.
        writing: a renewal is under way.
        fails: writes raise.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lease, self.writing, self.fails = b"", threading.Event(), False
        monkeypatch.setattr(lease, "newest_lease", lambda _place: None)
        monkeypatch.setattr(lease, "objects_below", lambda _url: {"00000001": None})
        monkeypatch.setattr(lease, "put_if_absent", lambda _url, _data: True)
        monkeypatch.setattr(lease, "put_object", self._put)
        monkeypatch.setattr("foundation.storage._RETRIES_S", ())

    def _put(self, _url: str, data: bytes) -> None:
        self.writing.set()
        if self.fails:
            raise StorageError("down")
        time.sleep(0.0 if json.loads(data)["released"] else 0.2)
        self.lease = data


@pytest.mark.parametrize("error", [None, RuntimeError("the copy failed")])
def test_a_renewal_that_is_under_way_does_not_undo_the_release(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlowStore(monkeypatch)
    with suppress(RuntimeError), lease.held(PLACE, token="a", silent_s=0.06, say=print):
        store.writing.wait()
        if error is not None:
            raise error
    assert json.loads(store.lease)["released"]


def test_what_was_written_is_no_failure_where_the_lease_cannot_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SlowStore(monkeypatch)
    with lease.held(PLACE, token="a", silent_s=60, say=print):
        store.fails = True
    assert store.writing.is_set()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lost_lease_is_told_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    SlowStore(monkeypatch)
    lost = pytest.raises(lease.LeaseLostError, match="another process has taken it over")
    with lost, lease.held(PLACE, token="a", silent_s=0.06, say=print):
        monkeypatch.setattr(lease, "objects_below", lambda _url: {"00000002": None})
        time.sleep(0.1)


def test_a_holder_that_was_paused_asks_before_it_writes_on(tmp_path: Path) -> None:
    place, silent_s = str(tmp_path), 0.1
    first = lease.take_lease(place, None, token="a", silent_s=silent_s)
    held = lease.Held(place, first)
    time.sleep(2 * silent_s)
    held.check()  # nobody else has come
    lease.take_lease(place, first, token="b", silent_s=60)
    time.sleep(2 * silent_s)
    for _ in range(2):
        with pytest.raises(lease.LeaseLostError, match=r"lease 2; this one's was 1"):
            held.check()


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
