"""Leases that let one process write to a place: numbered objects or files `.lease/00000003`; the highest counts.

A place is a URL, or a directory on a file system without locks (`foundation.lock`).

A process takes a lease by writing the next number on the condition that it does not exist: only one of several
processes succeeds. The holder renews its lease again and again. A lease that has not changed for as long as its holder
promised is out of date, and the next number may be taken; the same holds for a lease that its holder has given back. A
holder that was paused for longer finds a higher number, and has to stop writing. It checks before it writes each object
(`Held.check`): after a takeover at most the object that was being written during the pause arrives. The clocks of two
hosts are never compared.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from foundation.directory import whole_file
from foundation.errors import DataError, TrainingError
from foundation.paths import is_url
from foundation.storage import (
    StorageError,
    delete,
    objects_below,
    patiently,
    put_if_absent,
    put_object,
    read_file,
    storage_errors,
)

FOLDER = ".lease"
SILENT_S = 30.0
"""Default number of seconds without a renewal after which a lease is out of date."""
_RENEWALS = 6
"""Number of renewals in the time after which a lease would be out of date."""


@dataclass(frozen=True)
class Lease:
    """A numbered claim of one process to write to a place.

    Attributes:
        number: number of the lease; a place's highest number counts.
        token: text that only the process that took the lease has.
        host, pid: host name and process id of the holder.
        silent_s: seconds without a renewal after which the lease is out of date.
        renewed: number of renewals so far.
        released: whether the holder gave the lease back.
        status: JSON values that the holder publishes with each renewal.
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
        """Encodes the lease as the bytes of an object, in JSON."""
        return json.dumps(asdict(self)).encode()


class LeaseTakenError(DataError):
    """Another process holds the lease."""


class LeaseLostError(TrainingError):
    """Another process has taken over the lease."""


def newest_lease(place: str) -> Lease | None:
    """Reads a place's newest lease, the one that counts; None if no process has written there.

    Raises:
        DataError: the lease is damaged.
        StorageError: the store cannot be read.
    """
    for number in _numbers(place):
        with suppress(FileNotFoundError):  # a later lease has been taken meanwhile
            try:
                return Lease(**json.loads(data := _read(place, number)))
            except (ValueError, RecursionError, TypeError) as error:
                why = f"{_url(place, number)} is damaged: {error!r}"
                kind = DataError if data else StorageError  # an empty file is being written
                raise kind(f"{why}\n  try: delete it, when no process writes to {place}") from None
    return None


def wait_until_free(place: str, lease: Lease, *, say: Callable[[str], None]) -> None:
    """Waits until a lease that was not given back is out of date, which takes as long as its holder promised.

    Args:
        place: a URL.
        lease: the place's newest lease, just read.
        say: function that shows a line to the user.

    Raises:
        LeaseTakenError: the holder has renewed the lease, or another process has taken the next one.
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
    """Takes the lease after one that was given back or is out of date, and deletes earlier leases.

    Raises:
        LeaseTakenError: another process was faster.
        StorageError: the store cannot be written to.
    """
    number = 1 if after is None else after.number + 1
    lease = Lease(number, token, socket.gethostname(), os.getpid(), silent_s)
    if not _create(place, lease):
        raise _taken(place, newest_lease(place) or lease)
    for old in _numbers(place):
        if old < number:
            _delete(place, old)
    return lease


class Held:
    """A place's lease that this process holds; see `held`.

    Attributes:
        number: number of the lease.
    """

    def __init__(self, place: str, lease: Lease) -> None:
        self._place, self._lease, self.number = place, lease, lease.number
        self._renewed_at, self._renewing = time.monotonic(), threading.Lock()

    def check(self) -> None:
        """Checks before each write that the lease is still held; reads the place only if it may be out of date.

        Raises:
            LeaseLostError: another process has taken over the lease.
            StorageError: the store cannot be reached.
        """
        if time.monotonic() - self._renewed_at > self._lease.silent_s:
            self.renew()

    def renew(self, *, released: bool = False) -> None:
        """Renews the lease, or gives it back; raises the errors of `check`."""
        with self._renewing:
            began = time.monotonic()
            try:
                self._lease = renew(self._place, self._lease, status={}, released=released)
            except LeaseLostError:
                self._renewed_at = -math.inf
                raise
            self._renewed_at = began


@contextmanager
def held(
    place: str,
    *,
    token: str,
    silent_s: float,
    say: Callable[[str], None],
    lost: Callable[[LeaseLostError], object] = lambda _error: None,
) -> Iterator[Held]:
    """Takes the lease of a place to which no process writes, renews it while the block runs, and gives it back.

    Args:
        place: a URL, or the path of a directory.
        token: text that only this process has.
        silent_s: seconds without a renewal after which the lease is out of date.
        say: function that shows a line to the user.
        lost: function that the renewing thread calls when another process has taken over the lease.

    Raises:
        LeaseTakenError: another process writes to `place`.
        LeaseLostError: another process has taken over the lease meanwhile.
        StorageError: the store cannot be read or written to; failing to give the lease back is not an error.
    """
    before = patiently(partial(newest_lease, place))
    if before is not None:
        wait_until_free(place, before, say=say)
    lease = Held(place, patiently(partial(take_lease, place, before, token=token, silent_s=silent_s)))
    ended, interval_s = threading.Event(), silent_s / _RENEWALS

    def renew_always() -> None:
        while not ended.wait(interval_s):
            try:
                lease.renew()
            except StorageError:  # an upload reports its own failure
                continue
            except LeaseLostError as error:  # giving it back raises it again
                lost(error)
                return

    def give_back() -> None:
        ended.set()
        thread.join()  # a renewal that arrives after the release would undo it
        lease.renew(released=True)

    thread = threading.Thread(target=renew_always, name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    except BaseException:
        with suppress(StorageError, LeaseLostError):  # the error in the block is more informative
            give_back()
        raise
    with suppress(StorageError):  # everything is written, and the lease will soon be out of date
        patiently(give_back)


def renew(place: str, lease: Lease, *, status: Mapping[str, Any], released: bool = False) -> Lease:
    """Renews a lease, or gives it back.

    Raises:
        LeaseLostError: another process has taken the next one.
        StorageError: the store cannot be reached; the lease is unchanged or renewed.
    """
    newest = next(_numbers(place), 0)
    if newest != lease.number:
        why = f"{place}: another process has taken it over (lease {newest}; this one's was {lease.number})"
        raise LeaseLostError(f"{why}\n  try: nothing; the other process goes on from the newest checkpoint there")
    found = replace(lease, renewed=lease.renewed + 1, released=released, status=dict(status))
    _replace(place, found)
    return found


def _taken(place: str, lease: Lease) -> LeaseTakenError:
    why = f"{place}: another process is writing there: {lease.host}, pid {lease.pid}"
    return LeaseTakenError(f"{why}\n  try: wait for it, end it, or choose another place")


def _numbers(place: str) -> Iterator[int]:
    """The numbers of all leases, highest first."""
    folder = f"{place.rstrip('/')}/{FOLDER}"
    if is_url(place):
        names = [*objects_below(folder)]
    else:
        with storage_errors(folder, doing="listed"):
            names = [path.name for path in Path(folder).glob("*")]
    yield from sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def _read(place: str, number: int) -> bytes:
    with storage_errors(_url(place, number), missing=False):
        return read_file(_url(place, number))


def _create(place: str, lease: Lease) -> bool:
    """Writes a lease unless its number exists; returns whether it wrote the lease."""
    if is_url(place):
        return put_if_absent(_url(place, lease.number), lease.encoded())
    path = Path(_url(place, lease.number))
    with storage_errors(str(path), doing="written"):
        path.parent.mkdir(exist_ok=True)
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(lease.encoded())
            return True
    return False


def _replace(place: str, lease: Lease) -> None:
    if is_url(place):
        put_object(_url(place, lease.number), lease.encoded())
        return
    path = Path(_url(place, lease.number))
    with storage_errors(str(path), doing="written"), whole_file(path) as partial_file:
        partial_file.write_bytes(lease.encoded())


def _delete(place: str, number: int) -> None:
    if is_url(place):
        delete(_url(place, number))
    else:
        with storage_errors(_url(place, number), doing="deleted"):
            Path(_url(place, number)).unlink(missing_ok=True)


def _url(place: str, number: int) -> str:
    return f"{place.rstrip('/')}/{FOLDER}/{number:08d}"
