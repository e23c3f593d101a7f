"""Which process writes to a place in an object store: leases, numbered objects `.lease/00000003`, the highest counts.

A lease is taken by writing the next number on the condition that it does not exist, so that of several processes one
succeeds, and its holder renews it again and again. One that has not changed for as long as its holder has promised is
out of date, and the next number may be taken; so may that of a holder that has given it back. A holder that was paused
for longer finds a higher number, and has to stop writing. The clocks of two hosts are never compared.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from headrace.base.errors import DataError, TrainingError
from headrace.base.storage import (
    StorageError,
    delete,
    objects_below,
    patiently,
    put_if_absent,
    put_object,
    read_object,
)

FOLDER = ".lease"
_RENEWALS = 6
"""Times that a lease is renewed while it would become out of date."""


@dataclass(frozen=True)
class Lease:
    """One number of a place.

    Attributes:
        number: the higher one counts.
        token: of the process that has taken it; no other has the same.
        host, pid: of that process.
        silent_s: seconds without a renewal after which it is out of date.
        renewed: how often its holder has renewed it.
        released: its holder has given it back.
        status: what its holder tells of itself.
    """

    number: int
    token: str
    host: str
    pid: int
    silent_s: float
    renewed: int = 0
    released: bool = False
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def interval_s(self) -> float:
        """Seconds between two renewals."""
        return self.silent_s / _RENEWALS

    def encoded(self) -> bytes:
        """Its bytes as an object."""
        return json.dumps(asdict(self)).encode()


class LeaseTakenError(DataError):
    """Another process holds the lease."""


class LeaseLostError(TrainingError):
    """Another process has taken the lease over."""


def newest_lease(place: str) -> Lease | None:
    """The lease of a place that counts; None of a place that nobody has written to.

    Raises:
        DataError: it is damaged.
        StorageError: the store cannot be read.
    """
    for number in _numbers(place):
        with suppress(FileNotFoundError):  # a later one has been taken meanwhile
            try:
                return Lease(**json.loads(read_object(_url(place, number))))
            except (ValueError, TypeError) as error:
                why = f"{_url(place, number)} is damaged: {error!r}"
                raise DataError(f"{why}\n  try: delete it, when no process writes to {place}") from None
    return None


def wait_until_free(place: str, lease: Lease, *, say: Callable[[str], None]) -> None:
    """Returns once a lease that was not given back is out of date; takes as long as its holder has promised.

    Args:
        place: a URL.
        lease: its newest, as it was just read.
        say: takes a line for people.

    Raises:
        LeaseTakenError: its holder has renewed it, or another process has taken the next one.
    """
    if lease.released:
        return
    say(
        f"{place}: {lease.host} (pid {lease.pid}) wrote there last and has not given it back;"
        f" it counts as ended after {lease.silent_s:g} s without a renewal"
    )
    end = time.monotonic() + lease.silent_s
    while time.monotonic() < end:
        time.sleep(min(lease.interval_s, 1.0))
        now = patiently(partial(newest_lease, place))
        if now is None or now.released:
            return
        if (now.number, now.renewed) != (lease.number, lease.renewed):
            raise _taken(place, now)


def take_lease(place: str, after: Lease | None, *, token: str, silent_s: float) -> Lease:
    """Takes the lease after one that is given back or out of date, and deletes those before it.

    Raises:
        LeaseTakenError: another process has been quicker.
        StorageError: the store cannot be written to.
    """
    number = 1 if after is None else after.number + 1
    lease = Lease(number, token, socket.gethostname(), os.getpid(), silent_s)
    if not put_if_absent(_url(place, number), lease.encoded()):
        raise _taken(place, newest_lease(place) or lease)
    for old in _numbers(place):
        if old < number:
            delete(_url(place, old))
    return lease


@contextmanager
def held(place: str, *, token: str, silent_s: float, say: Callable[[str], None]) -> Iterator[Lease]:
    """Takes the lease of a place that nobody writes to, renews it while the block runs, and gives it back.

    Args:
        place: A URL.
        token: This process's token.
        silent_s: Seconds without a renewal after which the lease is out of date.
        say: Takes a line for people.

    Raises:
        LeaseTakenError: another process writes there.
        LeaseLostError: another process has taken it over meanwhile.
        StorageError: the store cannot be read or written to.
    """
    before = patiently(partial(newest_lease, place))
    if before is not None:
        wait_until_free(place, before, say=say)
    lease, ended = patiently(partial(take_lease, place, before, token=token, silent_s=silent_s)), threading.Event()

    def renew_always() -> None:
        renewed = lease
        while not ended.wait(lease.interval_s):
            with suppress(StorageError, LeaseLostError):  # the upload, or the last renewal, tells it
                renewed = renew(place, renewed, status={})

    thread = threading.Thread(target=renew_always, name="lease", daemon=True)
    thread.start()
    try:
        try:
            yield lease
        finally:  # before it is given back, which a renewal under way would undo
            ended.set()
            thread.join()
    except BaseException:
        with suppress(StorageError, LeaseLostError):  # the error in the block says more
            renew(place, lease, status={}, released=True)
        raise
    patiently(partial(renew, place, lease, status={}, released=True))


def renew(place: str, lease: Lease, *, status: Mapping[str, Any], released: bool = False) -> Lease:
    """Renews a lease, or gives it back.

    Raises:
        LeaseLostError: another process has taken the next one.
        StorageError: the store cannot be reached; the lease is as it was, or renewed.
    """
    newest = next(_numbers(place), 0)
    if newest != lease.number:
        why = f"{place}: another process has taken it over (lease {newest}; this one's was {lease.number})"
        raise LeaseLostError(f"{why}\n  try: nothing; the other one goes on from the newest checkpoint there")
    found = replace(lease, renewed=lease.renewed + 1, released=released, status=dict(status))
    put_object(_url(place, lease.number), found.encoded())
    return found


def _taken(place: str, lease: Lease) -> LeaseTakenError:
    why = f"{place}: another process is writing there: {lease.host}, pid {lease.pid}"
    return LeaseTakenError(f"{why}\n  try: wait for it, end it, or choose another place")


def _numbers(place: str) -> Iterator[int]:
    """The numbers of all leases, highest first."""
    names = objects_below(f"{place.rstrip('/')}/{FOLDER}")
    yield from sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def _url(place: str, number: int) -> str:
    return f"{place.rstrip('/')}/{FOLDER}/{number:08d}"
