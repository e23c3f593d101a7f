"""The seam between what is trained and who executes it.

The loop, evaluation, distillation and metrics are written once against `Engine`. An engine owns the model's shards,
the optimizer and the process group's collectives; it does not know what a run, a file or a schedule is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pipeline.checkpoint.plan import State
from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engines.objective import Objective
from pipeline.engines.replica import Replica

Gate = Callable[[float, float], bool]
"""Asked before an update, once per step: (loss, norm of the whole gradient before clipping) -> whether to make it.

The numbers are the same on every rank, so that all decide alike without a message. They need not be finite.
"""


def always(_loss: float, _grad_norm: float) -> bool:
    """The open gate."""
    return True


def never(_loss: float, _grad_norm: float) -> bool:
    """The closed gate: a step is computed and measured, and everything stays as it was."""
    return False


class StepOutcome(StrEnum):
    """What became of a step. But for the first, weights, moments and AdamW's counter are as they were before it."""

    APPLIED = "applied"
    OVERFLOW = "overflow"
    """The gradient overflowed fp16, whose loss scale has taken note of it."""
    NON_FINITE = "non_finite"
    """The loss or the gradient was not finite, and that was not fp16's doing."""
    REFUSED = "refused"
    """The gate was closed; fp16's loss scale is as it was, too."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    Attributes:
        loss: mean objective over the targets of the step, nats per token.
        parts: means of the objective's named parts.
        grad_norm: 2-norm of the whole gradient before clipping; infinite or NaN where it was not finite.
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
        """The weights were left as they are."""
        return self.outcome is not StepOutcome.APPLIED


@dataclass(frozen=True)
class Sums:
    """Cross-entropy summed over targets of an evaluation, over all ranks: `nats` / `targets` is the mean."""

    nats: float
    targets: int


class Engine(Protocol):
    """Executes steps of one model in one layout. Every method is called by all ranks together."""

    rank: int
    device_name: str

    def train_step(self, step: StepBatch, *, lr: float, allow: Gate = always) -> StepResult:
        """One optimizer update from this rank's micro-batches, unless it is not to be.

        A loss or a gradient that is not finite never reaches the weights or the moments. A step that was not applied
        leaves no gradient behind: the next one is as if it had not been.

        Args:
            step: the micro-batches.
            lr: learning rate.
            allow: see `Gate`.

        Raises:
            TrainingError: fp16 overflows at its smallest loss scale.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> Sums:
        """Cross-entropy over batches, without gradients. Every rank brings equally many."""
        ...

    def state(self) -> State:
        """This rank's named shards: fp32 weights and optimizer moments, as they are until the next step.

        Raises:
            CheckpointError: on all ranks when one could not fetch what it keeps on a disk.
        """
        ...

    def load(self, directory: Path) -> None:
        """Reads named shards that any engine wrote in any layout."""
        ...

    def replicas(self) -> Iterator[Replica]:
        """Values of this rank of which other ranks should hold the very same bits."""
        ...


__all__ = ["Engine", "Gate", "Objective", "Replica", "StepOutcome", "StepResult", "Sums", "always", "never"]
