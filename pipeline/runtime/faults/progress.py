"""Derives progress of long calls that report none, such as loading a checkpoint, from the process's I/O counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 1.0
_MIN_BYTES = 4096
"""Bytes per poll that count as progress; reading the counters itself takes some hundred bytes."""
_COUNTERS = {"rchar", "wchar"}, {"read_bytes", "write_bytes"}
"""Counters of bytes in read and write calls, and of bytes read from and written to disk. Only the second pair counts
memory-mapped files."""


@contextmanager
def progress_from_io(report_progress: Callable[[], None]) -> Iterator[None]:
    """Calls `report_progress` about once per second in which this process reads or writes, until the block ends."""
    finished = threading.Event()

    def poll(before: list[int]) -> None:
        while not finished.wait(_POLL_S):
            now = _io_bytes()
            if any(new - old >= _MIN_BYTES for new, old in zip(now, before, strict=True)):
                report_progress()
            before = now

    thread = threading.Thread(target=poll, args=(_io_bytes(),), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _io_bytes() -> list[int]:
    """Reads Linux's counters of this process's input and output bytes; constant on other systems."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        lines = []
    counters = {name: int(number) for name, _, number in (line.partition(": ") for line in lines)}
    return [sum(counters.get(name, 0) for name in names) for names in _COUNTERS]
