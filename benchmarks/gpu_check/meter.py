"""Times the steps of a training loop, each from the end of the step before to its own end, on the device's clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

PROFILED = 3
"""Number of steps in a profiler trace."""


class Meter:
    """Counts the steps of a loop, called at the end of each: warm-up steps, then timed ones, then profiled ones.

    On a GPU times are between CUDA events: the host's work between two steps counts if the device waits for it. On a
    CPU they are wall-clock times.

    Args:
        device: device of the loop.
        warmup: number of steps that are not timed: compilation, autotuning, first allocations.
        steps: number of timed steps.
        trace: file for a profiler trace of `PROFILED` further steps; None for no trace.
    """

    def __init__(self, device: torch.device, *, warmup: int, steps: int, trace: Path | None = None) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._warmup, self._last, self._trace = warmup, warmup + steps, trace
        self._ended, self._marks = 0, list[Any]()
        self._profiler: Any = None
        self._allocated: int | None = None
        self._reserved: int | None = None
        self.total = self._last + (PROFILED if trace else 0)

    @property
    def done(self) -> bool:
        """Whether all steps have been made."""
        return self._ended >= self.total

    def end_step(self) -> None:
        """Marks the end of a step."""
        self._ended += 1
        if self._ended == self._warmup and self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._warmup <= self._ended <= self._last:
            self._marks.append(self._mark())
        if self._ended == self._last:
            self._finish_timing()
        elif self._ended == self.total and self._profiler is not None:
            self._export()

    def seconds(self) -> list[float]:
        """Time of each timed step."""
        pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
        return [a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in pairs]

    def peak_bytes(self) -> tuple[int | None, int | None]:
        """Most bytes allocated and reserved on the device during the timed steps; None on a CPU."""
        return self._allocated, self._reserved

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _finish_timing(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)
            self._allocated = torch.cuda.max_memory_allocated(self._device)
            self._reserved = torch.cuda.max_memory_reserved(self._device)
        if self._trace is not None:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def _export(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        assert self._trace is not None
        self._profiler.stop()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._trace))
