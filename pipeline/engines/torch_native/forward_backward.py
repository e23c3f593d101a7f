"""Gradient accumulation: forward and backward passes of a step's micro-batches, without pipeline parallelism.

With `parallel.ep_overlap` the forward pass of a micro-batch runs beside the backward pass of the previous one, in turns
(`parallel.overlapped_passes`). Gradients are added up in the same order, so the result is the same. The first forward
pass of a step runs alone and compiles, because on a device tracing needs torch's thread for backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.base import Objective
from pipeline.engines.parallel.overlapped_passes import OverlappedPasses


class ForwardBackward(Protocol):
    """Runs the micro-batches of a step through this rank's part of the model."""

    def train(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> Tensor:
        """Accumulates the gradient of `scale` times the objective in the sharded parameters.

        Args:
            batches: this rank's micro-batches, on its device.
            objective: the loss.
            scale: factor on the loss before the backward pass.

        Returns:
            fp64 [1 + parts]: sums of the objective and its parts over the targets of the batches; zeros on ranks that
            do not compute the loss.
        """
        ...

    def score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        """Returns the same sums as `train` for one batch, without gradients."""
        ...


class GradientAccumulation:
    """Gradient accumulation with the whole decoder on every data rank.

    Args:
        root: the module that `sharding.shard_decoder` sharded.
        stage: ZeRO stage of the sharding, which determines when gradients are reduced.
        device: this rank's device.
        passes: runner that overlaps a forward pass with the previous backward pass; None without `parallel.ep_overlap`.
    """

    def __init__(self, root: Any, *, stage: int, device: torch.device, passes: OverlappedPasses | None = None) -> None:
        self._root, self._stage, self._device = root, stage, device
        self._passes = passes

    def train(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> Tensor:
        """Implements `ForwardBackward.train`."""
        sums = zero_sums(objective, self._device)
        forwards = [partial(self._root, batch.input_ids, batch, objective) for batch in batches]
        output = forwards[0]()
        for following in [*forwards[1:], None]:
            self._prepare(last=following is None)
            sums += torch.stack([each.detach() for each in output])
            backward = (output[0] * scale).backward
            if following is None:
                backward()
            elif self._passes is None:
                backward()
                output = following()
            else:
                output = self._passes.run(following, backward)
        return sums

    def score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        """Implements `ForwardBackward.score`."""
        return torch.stack(self._root(batch.input_ids, batch, objective)).double()

    def _prepare(self, *, last: bool) -> None:
        """Configures gradient reduction and resharding of FSDP2 for the next backward pass."""
        sync: Callable[[bool], None] = self._root.set_requires_gradient_sync
        # with HSDP, replicas all-reduce once per step; within a shard group, stages 2 and 3 reduce-scatter immediately
        (sync if self._stage < 2 else self._root.set_requires_all_reduce)(last)
        self._root.set_reshard_after_backward(last or self._stage == 3)


def zero_sums(objective: Objective, device: torch.device) -> Tensor:
    """Returns zeros, fp64 [1 + parts]: the sums of the loss and its parts before the first micro-batch."""
    return torch.zeros(1 + len(objective.parts), dtype=torch.float64, device=device)
