"""A lease that is held while a block runs: renewed, and given back when nothing renews it any more."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from headrace.base import lease as lease_module
from headrace.base.lease import Lease, LeaseLostError, held


def hold(monkeypatch: pytest.MonkeyPatch, renew: Any) -> Any:
    """`held` of a store in which only renewals happen, 50 of them each second."""
    monkeypatch.setattr(lease_module, "newest_lease", lambda _place: None)
    monkeypatch.setattr(lease_module, "take_lease", lambda *_, silent_s, token: Lease(1, token, "host", 1, silent_s))
    monkeypatch.setattr(lease_module, "renew", renew)
    return held("s3://bucket/run", token="a", silent_s=0.12, say=print)


def test_a_lease_is_given_back_after_a_renewal_that_is_under_way_when_the_block_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renews, written = threading.Event(), list[str]()

    def renew(_place: str, lease: Lease, *, released: bool = False, **_: Any) -> Lease:
        if not released:
            renews.set()
            time.sleep(0.2)
        written.append("released" if released else "renewed")
        return lease

    def fail_while_it_renews() -> None:
        assert renews.wait(60)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hold(monkeypatch, renew):
        fail_while_it_renews()
    assert written[-1] == "released"
    assert "renewed" in written


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lease_that_another_process_took_over_is_told_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    renews = threading.Event()

    def renew(*_: Any, **__: Any) -> Lease:
        renews.set()
        raise LeaseLostError("taken over")

    with pytest.raises(LeaseLostError, match="taken over"), hold(monkeypatch, renew):
        assert renews.wait(60)
