"""A lease that is held for a while: given back at the end, whatever the end is. Others: `tests/run/uploads`."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.base import lease
from headrace.base.storage import StorageError

PLACE = "s3://store/run"


class SlowStore:
    """A store with one lease, whose writes take a while.

    Attributes:
        lease: as it was written last.
        writing: a renewal is under way.
        fails: writes raise.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lease, self.writing, self.fails = b"", threading.Event(), False
        monkeypatch.setattr(lease, "newest_lease", lambda _place: None)
        monkeypatch.setattr(lease, "objects_below", lambda _url: {"00000001": None})
        monkeypatch.setattr(lease, "put_if_absent", lambda _url, _data: True)
        monkeypatch.setattr(lease, "put_object", self._put)
        monkeypatch.setattr("headrace.base.storage._RETRIES_S", ())

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
