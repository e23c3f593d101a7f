"""A lock file: who holds it works alone. flock, which the kernel lets go of however the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.base.errors import DataError


class LockedError(DataError):
    """Another process holds a lock file."""


@contextmanager
def lock_file(path: Path, *, doing: str, shared: bool = False) -> Iterator[int]:
    """Holds a lock file, which is made if need be; gives its descriptor.

    Args:
        doing: what whoever holds it does, for the message to others.
        shared: beside others who hold it so.

    Raises:
        LockedError: somebody else holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait until it has finished, or end it, then run again"
            raise LockedError(f"another process is {doing}\n  try: {remedy}") from None
        yield handle
    finally:
        os.close(handle)
