"""Wall-clock time of a step, from the previous step's report to its own. Imports no framework."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.runtime.metrics.sinks import JournalRow

T = TypeVar("T")


@dataclass(frozen=True)
class StepCost:
    """Time, speed and memory of a step.

    Attributes:
        seconds: seconds from the previous step's report to this step's, without checkpoints and evaluations.
        data_wait_seconds: part of `seconds` spent waiting for the batch.
        tokens_per_second: tokens per second over all ranks.
        mfu: model FLOPs utilization, a fraction; None where the device's peak is not known.
        memory: peak memory in bytes, and retries, by name (`PeakMemory`), the largest of all ranks.
    """

    seconds: float
    data_wait_seconds: float
    tokens_per_second: float
    mfu: float | None = None
    memory: dict[str, int] = field(default_factory=dict)

    def row(self) -> JournalRow:
        """Returns the values for a row of metrics."""
        times = {"seconds": self.seconds, "data_wait_seconds": self.data_wait_seconds}
        speed = {"tokens_per_second": self.tokens_per_second, **({"mfu": self.mfu} if self.mfu else {})}
        return {**times, **speed, **self.memory}


class StepClock:
    """Measures steps from report to report, which includes device work that continues after the host has gone on.

    A clock that starts and stops with a step misses an update that runs on the device until the next step begins.
    """

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._excluded = self._waited = 0.0
        self._depth = 0
        self.last_lap = 0.0
        """Seconds of the last lap."""

    def timed(self, steps: Iterable[T]) -> Iterator[T]:
        """Passes steps on and measures the wait for each. The first step begins when it is requested."""
        coming = iter(steps)
        self._mark, self._excluded, self._waited = time.perf_counter(), 0.0, 0.0
        while True:
            started = time.perf_counter()
            try:
                step = next(coming)
            except StopIteration:
                return
            self._waited += time.perf_counter() - started
            yield step

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leaves the time of the block out of all steps: a checkpoint, an evaluation. Blocks may be nested."""
        started = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._excluded += time.perf_counter() - started

    def lap(self) -> tuple[float, float]:
        """Returns the seconds since the last lap, without excluded time, and the part spent waiting for the batch."""
        now = time.perf_counter()
        seconds, waited = now - self._mark - self._excluded, self._waited
        self._mark, self._excluded, self._waited, self.last_lap = now, 0.0, 0.0, seconds
        return seconds, waited


class Stopwatch:
    """Adds up the time of blocks, which may be nested."""

    def __init__(self) -> None:
        self._depth, self._since, self._seconds = 0, 0.0, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block."""
        self._since = self._since if self._depth else time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._seconds += time.perf_counter() - self._since

    def take(self) -> float:
        """Returns the seconds since the last call, including a block that has not ended."""
        if self._depth:
            now = time.perf_counter()
            self._seconds, self._since = self._seconds + now - self._since, now
        taken, self._seconds = self._seconds, 0.0
        return taken
