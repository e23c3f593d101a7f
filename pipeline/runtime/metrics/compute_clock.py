"""Time of a rank's own computation: forward passes of decoder layers, in which it waits for no data-parallel rank.

Sharding engines gather a layer's weights before its forward pass and communicate gradients in and after its backward
pass. The forward pass in between is pure computation, at the speed of the device or the core, whatever the other ranks
do; backward passes take a multiple of its time. DeepSpeed's ZeRO-3 gathers the weights of each linear layer or norm
separately: with ZeRO-3 these modules are timed instead. Tensor- and context-parallel ranks wait for each other within a
layer, so they all show the speed of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import nn


@dataclass
class _StepMeasurements:
    """Measurements of a step.

    Attributes:
        samples: number of samples that the rank computes.
        seconds: seconds of forward passes on the CPU.
        events: CUDA events at the start and the end of forward passes.
    """

    samples: int
    seconds: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the device has passed the last event."""
        return not self.events or bool(self.events[-1][1].query())

    def total(self) -> float:
        """Sums the seconds of all forward passes."""
        on_device: float = sum(start.elapsed_time(end) for start, end in self.events) / 1e3
        return self.seconds + on_device


class ComputeClock:
    """Times the forward passes of modules while training.

    Args:
        modules: modules to time, none nested in another.
        gpu: whether they compute on a GPU, which is timed by events without making the host wait.
    """

    def __init__(self, modules: Sequence[nn.Module], *, gpu: bool) -> None:
        self._gpu, self._started = gpu, dict[nn.Module, Any]()
        self._steps: list[_StepMeasurements] = []
        # after the hook that gathers weights, and before the hook that frees them
        self._hooks = [
            each
            for module in modules
            for each in (
                module.register_forward_pre_hook(self._start),
                module.register_forward_hook(self._stop, prepend=True),
            )
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, samples: int) -> None:
        """Begins a step in which this rank computes `samples` samples."""
        self._steps.append(_StepMeasurements(samples))

    def take(self) -> tuple[float, int]:
        """Returns (seconds of forward passes, samples) of the steps that the device completed since the last call."""
        ready = list(takewhile(lambda step: step.complete, self._steps))
        self._steps = self._steps[len(ready) :]
        return sum(step.total() for step in ready), sum(step.samples for step in ready)

    def _start(self, module: nn.Module, _args: Any) -> None:
        if module.training and self._steps:
            self._started[module] = self._now()

    def _stop(self, module: nn.Module, _args: Any, _output: Any) -> None:
        started = self._started.pop(module, None)
        if started is None or not self._steps:
            return
        if self._gpu:
            self._steps[-1].events.append((started, self._now()))
        else:
            self._steps[-1].seconds += time.perf_counter() - started

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
