"""Long work that tells nothing of itself: that the process reads is the sign that it gets on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_GLANCE_S = 1.0
_LEAST = 4096
"""Bytes in a glance that are progress: to look at the counters is itself some hundred."""
_COUNTED = {"rchar", "wchar"}, {"read_bytes", "write_bytes"}
"""What the calls of a process have asked for, and what came from disks: also for files that are mapped."""


@contextmanager
def progress_by_reading(alive: Callable[[], None]) -> Iterator[None]:
    """Calls `alive` about once per second in which this process has read or written some, until the block ends."""
    over = threading.Event()

    def look(before: list[int]) -> None:
        while not over.wait(_GLANCE_S):
            now = _moved()
            if any(new - old >= _LEAST for new, old in zip(now, before, strict=True)):
                alive()
            before = now

    thread = threading.Thread(target=look, args=(_moved(),), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _moved() -> list[int]:
    """Bytes that Linux counts of a process's input and output; nothing ever on other systems."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        lines = []
    counted = {name: int(number) for name, _, number in (line.partition(": ") for line in lines)}
    return [sum(counted.get(name, 0) for name in names) for names in _COUNTED]
