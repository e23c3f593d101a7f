"""Forward and backward passes of a step without a pipeline: micro-batch after micro-batch through the whole decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.data.loader import MicroBatch
from pipeline.engines.base import Objective


class Passes(Protocol):
    """How the micro-batches of a step go through this rank's part of a model."""

    def train(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> Tensor:
        """Adds the gradient of `scale` times the objective to the sharded parameters.

        Args:
            batches: of this rank, on its device.
            objective: what is minimised.
            scale: a factor.

        Returns:
            fp64 [1 + parts]: sums of the objective and its parts over the targets of the batches; zeros on ranks that
            do not see the loss.
        """
        ...

    def score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        """The same sums of one batch, without gradients."""
        ...


class Accumulation:
    """The whole decoder on every data rank.

    Args:
        root: what `torch_sharding.shard` sharded.
        stage: of sharding: says when gradients travel.
        device: of this rank.
    """

    def __init__(self, root: Any, *, stage: int, device: torch.device) -> None:
        self._root, self._stage, self._device = root, stage, device

    def train(self, batches: Sequence[MicroBatch], objective: Objective, *, scale: float) -> Tensor:
        """See `Passes.train`."""
        sums = zeros(objective, self._device)
        for number, batch in enumerate(batches):
            self._prepare(last=number == len(batches) - 1)
            total, *parts = self._root(batch.input_ids, batch, objective)
            (total * scale).backward()
            sums += torch.stack([total.detach(), *parts])
        return sums

    def score(self, batch: MicroBatch, objective: Objective) -> Tensor:
        """See `Passes.score`."""
        return torch.stack(self._root(batch.input_ids, batch, objective)).double()

    def _prepare(self, *, last: bool) -> None:
        """Says what FSDP2 does after the next backward pass."""
        sync: Callable[[bool], None] = self._root.set_requires_gradient_sync
        # copies of hybrid sharding are summed once per step; within a shard group stages 2 and 3 sum at once
        (sync if self._stage < 2 else self._root.set_requires_all_reduce)(last)
        self._root.set_reshard_after_backward(last or self._stage == 3)


def zeros(objective: Objective, device: torch.device) -> Tensor:
    """fp64 [1 + parts]: nothing summed yet."""
    return torch.zeros(1 + len(objective.parts), dtype=torch.float64, device=device)
