"""A rank's own time per step: the time of its own work, without waits for other ranks, for straggler detection.

Synchronous ranks all take equally long for a step, since fast ranks wait in collectives: with ZeRO-3, tensor and
context parallelism in every layer. So step times do not show a straggler; only the part of a step in which a rank does
not wait shows it. There are three clocks, none of which covers everything:

- host: one profiled step, without the time in which communication is in flight and no operator runs. It shows what
  slows the host down: a slow or shared core, a process or virtual machine that is suspended now and then;
- cores: CPU time of the main thread and its time in the run queue, median of all steps. It also shows a rank that is
  scheduled late after each message. It is not used with a GPU, since waiting for a GPU spins on a core;
- kernels: the GPU's kernels and copies in the profiled step, without NCCL's.

A rank's own time is the longest of the three.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_COMMUNICATION = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"}
_MESSAGES = ("gloo:", "mpi:")
"""Prefixes of the profiler's names of communication in flight."""
_DRIVER = ("cuda_runtime", "cuda_driver")
_STEP = "headrace::step"


class Span(NamedTuple):
    """A profiled span. It is a tuple: there are thousands, and a dataclass takes four times as long to create.

    Attributes:
        name: name of an operator or a kernel.
        kind: Kineto's activity type: cpu_op, cuda_runtime, kernel, gpu_memcpy, ...
        thread: thread id on the host; no meaning on a device.
        start: start time in ns.
        end: end time in ns.
    """

    name: str
    kind: str
    thread: int
    start: int
    end: int


@contextmanager
def profiled(*, gpu: bool) -> Iterator[list[Span]]:
    """Profiles the block and fills the list with its spans; leaves it empty if another profiler is active.

    Args:
        gpu: whether to record GPU kernels, too.
    """
    found: list[Span] = []
    if torch.autograd._profiler_enabled():  # a second, concurrent profiler ends in a segmentation fault
        yield found
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it logs to stderr when it starts and stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    profiler = profile(activities=activities)  # acc_events=True would cost ten times as much
    profiler.start()
    try:
        with record_function(_STEP):
            yield found
    finally:
        profiler.stop()  # waits for the GPU
    found += _spans(profiler)


def _spans(profiler: profile) -> list[Span]:
    inner: Any = profiler.profiler  # torch's own table of events takes ten times as long to build
    events = inner.kineto_results.events()
    return [Span(e.name(), e.activity_type(), e.start_thread_id(), e.start_ns(), e.end_ns()) for e in events]


def host_seconds(spans: Iterable[Span]) -> float:
    """Sums the seconds of the step in which the host did not wait; 0 if no step was profiled.

    The host waits while communication or a driver call is in flight and no thread is inside an operator that does not
    communicate. Python code that runs during a background message counts as waiting, too.
    """
    threads: dict[int, list[_Timed]] = defaultdict(list)
    waits: list[tuple[int, int]] = []
    length = 0
    for name, kind, thread, start, end in spans:
        found = _meaning(name, kind)
        if found in (_WORK, _CALL):
            threads[thread].append((start, -end, found == _WORK))
        if found in (_CALL, _MESSAGE):
            waits.append((start, end))
        elif name == _STEP:
            length = end - start
    works = [interval for each in threads.values() for interval in _works(each)]
    return (length - _outside(waits, works)) / 1e9 if length else 0.0


_Timed = tuple[int, int, bool]
"""(start, -end, is work): sorted, an enclosing span comes before those inside it."""
_NOTHING, _WORK, _CALL, _MESSAGE = range(4)
"""Kinds of spans: a call blocks its thread; a message is in flight, whichever thread it is listed in."""


@lru_cache(maxsize=4096)  # thousands of spans have only some hundred names
def _meaning(name: str, kind: str) -> int:
    space, found, rest = name.partition("::")
    if name.startswith(_MESSAGES):
        return _MESSAGE
    if kind in _DRIVER or (kind == "cpu_op" and space in _COMMUNICATION):
        return _CALL
    return _WORK if kind == "cpu_op" and found and rest.isidentifier() else _NOTHING


def _works(spans: list[_Timed]) -> Iterator[tuple[int, int]]:
    """Yields intervals in which a thread works: in an operator, but not in a collective or driver call inside it."""
    around: list[tuple[int, bool]] = [(1 << 63, False)]
    at = 0
    for start, minus_end, is_work in sorted(spans):
        while around[-1][0] <= start:
            end, worked = around.pop()
            if worked and end > at:
                yield at, end
            at = max(at, end)
        if around[-1][1] and start > at:
            yield at, start
        at = max(at, start)
        around.append((-minus_end, is_work))
    for end, worked in reversed(around[1:]):
        if worked and end > at:
            yield at, end
        at = max(at, end)


def _outside(waits: list[tuple[int, int]], works: list[tuple[int, int]]) -> int:
    """Sums the time with a wait and no work, in ns."""
    marks = [mark for start, end in waits for mark in ((start, 1, 0), (end, -1, 0))]
    marks += [mark for start, end in works for mark in ((start, 0, 1), (end, 0, -1))]
    total = last = waiting = working = 0
    for at, wait, work in sorted(marks):
        if waiting and not working:
            total += at - last
        last, waiting, working = at, waiting + wait, working + work
    return total


def kernel_seconds(spans: Iterable[Span]) -> float:
    """Sums the seconds of GPU kernels, copies and fills over streams, without NCCL's."""
    own = (s for s in spans if s.kind in ("kernel", "gpu_memcpy", "gpu_memset") and not s.name.startswith("nccl"))
    return sum(span.end - span.start for span in own) / 1e9


class CoreClock:
    """Clock of the creating thread's time on a core or in the run queue.

    Source: Documentation/scheduler/sched-stats.rst of Linux, /proc/PID/schedstat. Without that file, CPU time alone.
    """

    def __init__(self) -> None:
        self._file: FileIO | None = None
        with suppress(OSError):
            # kept open: opening it for every step takes longer than reading it
            self._file = Path("/proc/thread-self/schedstat").open("rb", buffering=0)  # noqa: SIM115

    def seconds(self) -> float:
        """Returns the seconds since the thread started."""
        if self._file is None:
            return time.thread_time()
        self._file.seek(0)
        on, waiting, _ = self._file.read().split()
        return (int(on) + int(waiting)) / 1e9
