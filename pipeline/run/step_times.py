"""The time of a step over an attempt: quartiles of the newest steps, without the warm-up. No torch."""

from __future__ import annotations

import statistics
import time
from collections import deque

WARM_UP = 3
"""First steps of an attempt that do not count: kernels are compiled, memory and communicators are allocated."""

NEWEST = 1000
"""Newest steps whose times are kept."""


class StepTimes:
    """Seconds of the newest steps of an attempt, without its warm-up and steps that compiled.

    The CPU time of this process beside that of the clock tells a busy host from a slow one.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=NEWEST)
        self._cpu: deque[float] = deque(maxlen=NEWEST)
        self._seen, self._mark = 0, time.process_time()

    def add(self, seconds: float, *, compiled: bool) -> None:
        """Adds a step."""
        self._seen += 1
        before, self._mark = self._mark, time.process_time()
        if self._seen > WARM_UP and not compiled:
            self._seconds.append(seconds)
            self._cpu.append(self._mark - before)

    def __len__(self) -> int:
        return len(self._seconds)

    def quartiles(self) -> tuple[float, float, float] | None:
        """First quartile, median and third quartile in seconds; None for fewer than two steps."""
        if len(self._seconds) < 2:
            return None
        low, median, high = statistics.quantiles(self._seconds, n=4, method="inclusive")
        return low, median, high

    def cpu_median(self) -> float:
        """Median CPU seconds from one report to the next, with checkpoints and evaluations between them."""
        return statistics.median(self._cpu)
