"""The seam between what is trained and who executes it.

The loop, evaluation, distillation and metrics are written once against `Engine`. An engine owns the model's shards,
the optimizer and the process group's collectives; it does not know what a run, a file or a schedule is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.data.loader import MicroBatch, StepBatch
from pipeline.engines.objective import Objective


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    Attributes:
        loss: mean objective over the targets of the step, nats per token.
        parts: means of the objective's named parts.
        grad_norm: 2-norm of the whole gradient before clipping; not finite when the step was skipped.
        skipped: the gradient overflowed fp16 and the weights were left as they are.
        loss_scale: fp16's loss scale in this step; None in other precisions.
    """

    loss: float
    parts: dict[str, float]
    grad_norm: float
    skipped: bool = False
    loss_scale: float | None = None


@dataclass(frozen=True)
class Sums:
    """Cross-entropy summed over targets of an evaluation, over all ranks: `nats` / `targets` is the mean."""

    nats: float
    targets: int


class Engine(Protocol):
    """Executes steps of one model in one layout. Every method is called by all ranks together."""

    rank: int
    device_name: str

    def train_step(self, step: StepBatch, *, lr: float) -> StepResult:
        """One optimizer update from this rank's micro-batches.

        Raises:
            TrainingError: the loss or the gradient is not finite; a non-finite loss never reaches the weights.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> Sums:
        """Cross-entropy over batches, without gradients. Every rank brings equally many."""
        ...

    def save(self, directory: Path) -> None:
        """Writes this rank's named shards: fp32 weights and optimizer moments."""
        ...

    def load(self, directory: Path) -> None:
        """Reads named shards that any engine wrote in any layout."""
        ...


__all__ = ["Engine", "Objective", "StepResult", "Sums"]
