"""What a part of the product costs this process or another: CPU and wall-clock seconds, memory, file operations."""

from __future__ import annotations

import functools
import gc
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_OPERATIONS = {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"}
"""Events of `sys.addaudithook` that are one operation of a file system each; `stat` has none, and is counted by a
wrapper."""
_TICKS = os.sysconf("SC_CLK_TCK")
_count = 0


@dataclass
class Figures:
    """What the process costs that has most to do.

    Attributes:
        cpu_s: CPU seconds, of all threads.
        seconds: wall-clock seconds.
        bytes: memory at its peak beyond what the process had before.
        file_operations: opens, stats, listings, renames and removals.
        messages: sent to it and by it.
        read_bytes: read from files, where the part counts them.
    """

    cpu_s: float = 0.0
    seconds: float = 0.0
    bytes: float = 0.0
    file_operations: float = 0.0
    messages: float = 0.0
    read_bytes: float = 0.0

    def times(self, factor: float) -> Figures:
        """The costs of so many such blocks; memory stays."""
        return Figures(**{key: value * (1 if key == "bytes" else factor) for key, value in asdict(self).items()})


@contextmanager
def measured() -> Iterator[Figures]:
    """Measures the block in this process; the figures are complete once it has ended."""
    figures = Figures()
    _count_operations()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, memory, operations, start = _own_cpu_s(), _status("self", "VmRSS"), _count, time.monotonic()
    yield figures
    figures.seconds = time.monotonic() - start
    figures.cpu_s = _own_cpu_s() - before
    figures.file_operations = _count - operations
    figures.bytes = max(0, _status("self", "VmHWM") - memory)


@contextmanager
def measured_process(pid: int, *, had: int = 0) -> Iterator[Figures]:
    """Measures what another process does during the block; memory is its peak so far, less `had` bytes."""
    figures, start, before = Figures(), time.monotonic(), cpu_s(pid)
    yield figures
    figures.seconds, figures.cpu_s = time.monotonic() - start, cpu_s(pid) - before
    figures.bytes = max(0, _status(pid, "VmHWM") - had)


def resident_bytes(pid: int) -> int:
    """Memory of another process now."""
    return _status(pid, "VmRSS")


def _own_cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def cpu_s(pid: int) -> float:
    """CPU seconds of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _status(pid: int | str, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


@functools.cache
def _count_operations() -> None:
    def note(event: str, _arguments: tuple[Any, ...]) -> None:
        global _count  # noqa: PLW0603  a hook of the interpreter, which stays until its end
        _count += event in _OPERATIONS

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            global _count  # noqa: PLW0603
            _count += 1
            return function(*arguments, **named)

        return call

    sys.addaudithook(note)
    os.stat, os.lstat = counted(os.stat), counted(os.lstat)


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        name: name of the part; its group comes first, as in "heartbeats: a minute".
        what: description of the measurement, for the page.
        unit: unit of the sizes.
        sizes: four or more, ascending.
        target: size for a thousand nodes of eight GPUs, or for another target that the page's heading names.
        run: measures one size in a process of its own, with an empty directory to work in; asserts what must hold.
        note: further text for the page, such as a mended fault or a limit and its reason.
        absent: reason that the part cannot be measured here; None if it can.
        per_process: whether the figures hold for one process alone; a file system that all share has no known limit.
    """

    name: str
    what: str
    unit: str
    sizes: tuple[int, ...]
    target: int
    run: Callable[[int, Path], Figures]
    note: str = ""
    per_process: bool = True
    absent: str | None = None

    @property
    def group(self) -> str:
        """The beginning of its name."""
        return self.name.partition(":")[0]
