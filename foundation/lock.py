"""Lock files, each held by one process at a time, by flock: the kernel releases the lock however the process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foundation.errors import DataError

_POLL_S = 0.1


class LockedError(DataError):
    """Another process holds a lock file."""


class NoLocksError(DataError, OSError):
    """A file system lacks locks, e.g. Lustre mounted without `flock`, or NFS without its lock service."""


@contextmanager
def lock_file(
    path: Path,
    *,
    doing: str,
    shared: bool = False,
    timeout_s: float = 0.0,
    wait: Callable[[], object] = lambda: None,
) -> Iterator[int]:
    """Holds a lock file, creating it if needed; yields its descriptor.

    Args:
        doing: the holder's work, for the message to other processes, e.g. "writing X".
        shared: whether other processes may hold the lock at the same time, also shared.
        timeout_s: seconds to wait while another process holds the lock; infinity for no limit.
        wait: function that is called every 0.1 s while waiting.

    Raises:
        LockedError: another process holds the lock.
        NoLocksError: the file is on a file system without locks.
        OSError: the file cannot be made.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + timeout_s
    try:
        while not _taken(path, handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                remedy = "wait until it has finished, or end it, then run again"
                raise LockedError(f"another process is {doing}\n  try: {remedy}")
            wait()
            time.sleep(_POLL_S)
        yield handle
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool | None:
    """Whether a process holds a lock file exclusively; None if the file system has no locks.

    The lock is taken shared and released at once: another process that wants it at that moment has to wait longer.
    """
    with suppress(FileNotFoundError), path.open() as file:
        try:
            return not _taken(path, file.fileno(), fcntl.LOCK_SH)
        except NoLocksError:
            return None
    return False


def _taken(path: Path, handle: int, operation: int) -> bool:
    try:
        fcntl.flock(handle, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        why = f"{path} cannot be locked: its file system has no locks ({error.strerror})"
        raise NoLocksError(f"{why}\n  try: mount it with locks (flock), or choose another directory") from None
    return True
