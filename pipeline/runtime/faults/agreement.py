"""Decisions that are the same on all ranks (stop, commit a checkpoint, ...): flags in a step's all-reduce, maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.runtime.faults.stop_signals import Stop, StopSignals
from pipeline.runtime.launch.host_copy import HostCopy, to_device


@dataclass(frozen=True)
class StepFlags:
    """Flags that a rank sends with the figures of a step; after `agreed`, the flags that any rank has set.

    Attributes:
        stop: the stop that was requested.
        busy: whether this rank's part of a checkpoint is still being written.
        checkpoint_due: whether it is time for a checkpoint.
        hooks: one flag for each training-loop hook that uses one, in the order of the hooks.
    """

    stop: Stop
    busy: bool = False
    checkpoint_due: bool = False
    hooks: Sequence[bool] = ()

    def values(self) -> list[float]:
        """Encodes the flags for an all-reduce: a number per reason to stop and per flag; `agreed` decodes the sums."""
        stops = [float(self.stop == reason) for reason in Stop if reason]
        flags = (self.busy, self.checkpoint_due, *self.hooks)
        return [*stops, *map(float, flags)]

    @classmethod
    def agreed(cls, sums: Sequence[float]) -> StepFlags:
        """Decodes the sums of `values` over all ranks; of several reasons to stop the highest counts."""
        reasons = [reason for reason in Stop if reason]
        raised = [each > 0 for each in sums]
        stops, (busy, due, *hooks) = raised[: len(reasons)], raised[len(reasons) :]
        given = [reason for reason, set_by_any in zip(reasons, stops, strict=True) if set_by_any]
        return cls(max(given, default=Stop.NO), busy, due, hooks)


class Agreement:
    """Computes maxima over all ranks.

    Args:
        device: this rank's device; the all-reduce uses the gradients' backend, the fastest one.

    Attributes:
        device: this rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def max_over_ranks(self, *values: int) -> list[int]:
        """Computes the maximum of each value over all ranks. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        maxima: list[int] = reduced.tolist()
        return maxima

    def begin_max(self, *values: int) -> HostCopy:
        """Begins to find the maximum of each value over all ranks; `read` waits for it. Collective."""
        reduced = torch.tensor(values, dtype=torch.int64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            reduced = to_device(reduced, self.device)
            dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        return HostCopy(reduced)

    def requested_stop(self, signals: StopSignals) -> Stop:
        """Returns the strongest stop signal that any rank has received. Collective."""
        return Stop(self.max_over_ranks(signals.requested)[0])
