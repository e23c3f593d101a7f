"""The `Engine` protocol: forward, backward and optimizer steps of one model under one parallelism layout.

The training loop, evaluation, distillation and metrics are written once against `Engine`. An engine owns the model's
shards, the optimizer and the collectives; it knows nothing of runs, files or learning-rate schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.shard_table import State
from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engines.objective import Objective

UpdateGate = Callable[[float, float], bool]
"""Called once per step before the optimizer update with (loss, gradient norm before clipping): whether to update.

Both arguments are global values, the same on every rank, so that all ranks decide alike without communication. They may
be NaN or infinite.
"""


def always_update(_loss: float, _grad_norm: float) -> bool:
    """The update gate that allows every update."""
    return True


def never_update(_loss: float, _grad_norm: float) -> bool:
    """The update gate that allows none: loss and gradient norm are computed, and no state changes."""
    return False


class StepOutcome(StrEnum):
    """Whether a step was applied; if not, weights, optimizer states and step counter are as they were before it."""

    APPLIED = "applied"
    OVERFLOW = "overflow"
    """The fp16 gradient overflowed; the loss scaler has counted the overflow."""
    NON_FINITE = "non_finite"
    """The loss or the gradient norm was not finite, for a reason other than an fp16 overflow."""
    REFUSED = "refused"
    """The update gate did not allow the update; the loss scaler's state is unchanged too."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same on every rank.

    Attributes:
        loss: mean objective over the target tokens of the step, nats per token.
        parts: means of the objective's named parts, and of a mixture of experts what `ExpertBalancer.end_step` returns.
        grad_norm: 2-norm of the global gradient before clipping; infinite or NaN where it was not finite.
        outcome: whether the weights were updated, and if not, why.
        loss_scale: fp16's loss scale in this step; None in other precisions.
    """

    loss: float
    parts: dict[str, float]
    grad_norm: float
    outcome: StepOutcome = StepOutcome.APPLIED
    loss_scale: float | None = None

    @property
    def skipped(self) -> bool:
        """Whether the weights were left unchanged."""
        return self.outcome is not StepOutcome.APPLIED


@dataclass(frozen=True)
class EvaluationSums:
    """Cross-entropy summed over the targets of an evaluation and over all ranks: `nats` / `targets` is the mean."""

    nats: float
    targets: int


@dataclass(frozen=True)
class Replica:
    """This rank's copy of values that several ranks hold and that should be bit-identical on all of them.

    Attributes:
        name: Hugging Face name of the parameter.
        values: any shape and dtype; the same shape on all ranks of the group.
        group: the ranks that hold a copy.
    """

    name: str
    values: Tensor
    group: dist.ProcessGroup


class Engine(Protocol):
    """Executes training steps of one model under one layout. Every method is collective: all ranks call it."""

    rank: int
    device_name: str

    def train_step(self, step: StepBatch, *, lr: float, update_gate: UpdateGate = always_update) -> StepResult:
        """Accumulates gradients over this rank's micro-batches and makes one optimizer update, unless it is skipped.

        A non-finite loss or gradient never reaches the weights or the optimizer states. A skipped step leaves no
        gradient behind: the next step runs as if it had not happened.

        Args:
            step: the micro-batches.
            lr: learning rate.
            update_gate: see `UpdateGate`.

        Raises:
            TrainingError: fp16 overflows at its smallest loss scale.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> EvaluationSums:
        """Cross-entropy over batches, without gradients. Every rank must pass the same number of batches."""
        ...

    def state(self) -> State:
        """This rank's named shards: fp32 weights and optimizer states, valid until the next step.

        Raises:
            CheckpointError: on all ranks, when one rank could not read the state that it offloads to a disk.
        """
        ...

    def load(self, directory: Path, *, fresh_optimizer: bool = False) -> None:
        """Loads named shards that any engine wrote under any layout.

        Args:
            directory: of the checkpoint.
            fresh_optimizer: the optimizer's states are set to zero instead, as before the first step: the checkpoint is
                of an optimizer of another kind.
        """
        ...

    def replicas(self) -> Iterator[Replica]:
        """This rank's values of which other ranks should hold bit-identical copies."""
        ...


__all__ = [
    "Engine",
    "EvaluationSums",
    "Objective",
    "Replica",
    "StepOutcome",
    "StepResult",
    "UpdateGate",
    "always_update",
    "never_update",
]
