"""Max all-reduce of a few integers after every step, so that all ranks take the same decision (stop, commit, ...)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeline.faults.stop import Stop, StopSignals


class Agreement:
    """Computes maxima over all ranks.

    Args:
        device: of this rank; the all-reduce uses the backend of the gradients, which is the fastest one.

    Attributes:
        device: the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def max_over_ranks(self, *values: int) -> list[int]:
        """The maximum of each value over all ranks. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        maxima: list[int] = reduced.tolist()
        return maxima

    def requested_stop(self, signals: StopSignals) -> Stop:
        """The strongest stop signal that any rank has received. Collective."""
        return Stop(self.max_over_ranks(signals.requested)[0])
