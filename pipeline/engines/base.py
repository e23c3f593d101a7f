"""The `Engine` protocol: forward, backward and optimizer steps of one model under one parallelism layout.

The training loop, evaluation, distillation and metrics are written once against `Engine`. An engine owns the model's
shards, the optimizer and the collectives; it knows nothing of runs, files or learning-rate schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.memory.shard_files import ShardFiles
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.objective import Objective
from pipeline.engines.parallel.decoder import Decoder

HostValues = Callable[[], Sequence[float]]
"""Callback that returns this rank's numbers, called once per step on every rank; the step's result has their sums.

The numbers are summed with the loss in the step's one all-reduce, fp64. All ranks return equally many.
"""


def no_host_values() -> Sequence[float]:
    """Returns no numbers."""
    return ()


class StepOutcome(StrEnum):
    """Outcome of a step; if it was not applied, weights, optimizer states and step counter are unchanged."""

    APPLIED = "applied"
    OVERFLOW = "overflow"
    """The fp16 gradient overflowed; the loss scaler has counted the overflow."""
    NON_FINITE = "non_finite"
    """The loss or the gradient norm was not finite, for a reason other than an fp16 overflow."""
    REFUSED = "refused"
    """Loss or gradient norm are above the step's limits; the loss scaler's state is unchanged too."""


@dataclass(frozen=True)
class UpdateLimits:
    """Limits of loss and gradient norm for an update, set before the step, so that the device can decide alone.

    Attributes:
        loss: largest loss.
        grad_norm: largest gradient norm before clipping.
        repetition: whether the step was executed before. Then any reason not to apply it counts as `REFUSED`, so that
            fp16's loss scale does not change.
    """

    loss: float = math.inf
    grad_norm: float = math.inf
    repetition: bool = False

    def outcome(self, loss: float, grad_norm: float, *, scaled: bool) -> StepOutcome:
        """Decides whether a step with these numbers, which may be NaN or infinite, is applied.

        A non-finite loss is not an fp16 overflow: it comes from the forward pass, where nothing is scaled.

        Args:
            loss: mean loss of the step, nats per token.
            grad_norm: gradient norm before clipping.
            scaled: whether the loss is scaled (fp16).
        """
        found = self._outcome(loss, grad_norm, scaled=scaled)
        return StepOutcome.REFUSED if self.repetition and found is not StepOutcome.APPLIED else found

    def _outcome(self, loss: float, grad_norm: float, *, scaled: bool) -> StepOutcome:
        finite = math.isfinite(grad_norm)
        if not math.isfinite(loss) or not (finite or scaled):
            return StepOutcome.NON_FINITE
        if loss > self.loss:
            return StepOutcome.REFUSED
        if not finite:
            return StepOutcome.OVERFLOW
        return StepOutcome.REFUSED if grad_norm > self.grad_norm else StepOutcome.APPLIED


NO_LIMITS = UpdateLimits()
"""Every finite step is applied."""
NO_UPDATE = UpdateLimits(loss=-math.inf, grad_norm=-math.inf, repetition=True)
"""No step is applied: loss and gradient norm are computed, and no state changes."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same on every rank.

    Attributes:
        loss: mean objective over the target tokens of the step, nats per token; NaN if it has none (`GuardedStepper`).
        parts: means of the objective's named parts, and the values that every `StepMeasure` reports.
        grad_norm: 2-norm of the global gradient before clipping; may be infinite or NaN.
        outcome: whether the weights were updated, and if not, why.
        loss_scale: fp16's loss scale in this step; None in other precisions.
        host_sums: sums of the step's `HostValues` over all ranks.
    """

    loss: float
    parts: dict[str, float]
    grad_norm: float
    outcome: StepOutcome = StepOutcome.APPLIED
    loss_scale: float | None = None
    host_sums: tuple[float, ...] = ()

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
    """This rank's copy of values that should be bit-identical on several ranks.

    Attributes:
        name: Hugging Face name of the parameter.
        values: the copy, of any dtype and of the same shape on all ranks of the group.
        group: the ranks that have a copy.
    """

    name: str
    values: Tensor
    group: dist.ProcessGroup


class GradientExchange(Protocol):
    """Sums the gradients of a step over replicas of the model outside of this engine."""

    def __call__(self, step: StepBatch, gradients: Sequence[Tensor], sums: Tensor) -> Sequence[MicroBatch]:
        """Sums the gradients of a step; called after its backward passes, before clipping and update. Collective.

        Args:
            step: the step's batch, whose micro-batches have been run.
            gradients: this rank's gradient shards, fp32, of all trained parameters. Unless micro-batches are returned,
                they are replaced in place by the sums over the replicas.
            sums: [1 + parts], sums of the loss and its parts, replaced likewise.

        Returns:
            More micro-batches for this rank, equally many on all ranks. The caller runs them, adds their gradients and
            sums, and calls again.
        """
        ...


@runtime_checkable
class ExchangesGradients(Protocol):
    """An engine whose gradients can be summed over replicas of the model."""

    def exchange_gradients_by(self, exchange: GradientExchange) -> None:
        """Sets the exchange to use from the next step on; each step then finishes before the next begins."""
        ...


class StepMeasure(Protocol):
    """Measures something in the forward passes of a step, and reports it with the step's result."""

    def end_step(self, *, targets: int, vetoed: Tensor | bool) -> Tensor:
        """Ends the step; the host waits for nothing. Collective.

        Args:
            targets: number of target tokens in the whole step.
            vetoed: whether the weights were left unchanged, bool scalar.

        Returns:
            fp64 [n] on the device.
        """
        ...

    def parts(self, values: Sequence[float]) -> dict[str, float]:
        """Names the values that `end_step` returned, for `StepResult.parts`."""
        ...


class PendingStep(Protocol):
    """A step that was begun; the device may still be computing it."""

    def result(self) -> StepResult:
        """Waits for the step's numbers; every call returns the same result.

        Raises:
            TrainingError: fp16 overflows at its smallest loss scale.
        """
        ...


@dataclass(frozen=True)
class FinishedStep:
    """A step whose result is known when `begin_step` returns."""

    known: StepResult

    def result(self) -> StepResult:
        """Implements `PendingStep.result`."""
        return self.known


class Engine(Protocol):
    """Executes training steps of one model under one layout. Every method is collective: all ranks call it.

    Attributes:
        deferred: whether `begin_step` returns while the device is still at work. Callers then request a step's result
            after beginning the next step, with the previous one as `after`. Otherwise each step finishes first.
    """

    rank: int
    device_name: str
    deferred: bool

    def begin_step(
        self,
        step: StepBatch,
        *,
        lr: float,
        limits: UpdateLimits = NO_LIMITS,
        after: PendingStep | None = None,
        host_values: HostValues = no_host_values,
    ) -> PendingStep:
        """Accumulates gradients over this rank's micro-batches and makes one optimizer update, unless it is skipped.

        A non-finite loss or gradient never reaches the weights or the optimizer states. A skipped step leaves no
        gradient behind: the next step runs as if it had not happened.

        Args:
            step: the micro-batches.
            lr: learning rate.
            limits: largest loss and gradient norm with which the update is made.
            after: the previous step, if its result has not been requested; only with `deferred`. If that step is not
                applied, neither is this one, whatever its own numbers.
            host_values: callback that returns this rank's numbers; their sums over all ranks are in the result.
        """
        ...

    def train_step(self, step: StepBatch, *, lr: float, limits: UpdateLimits = NO_LIMITS) -> StepResult:
        """Begins a step and waits for its result.

        Raises:
            TrainingError: fp16 overflows at its smallest loss scale.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch]) -> EvaluationSums:
        """Computes the cross-entropy of batches, without gradients. Every rank must pass the same number of batches."""
        ...

    def forward_passes(self, batches: Iterable[MicroBatch], objective: Objective) -> None:
        """Runs forward passes in evaluation mode, without gradients; only the objective keeps their results.

        Each batch is requested after the previous pass, so that it can be made from the results; with pipeline
        parallelism it may be requested earlier. Every rank must pass the same number of batches.

        Args:
            batches: micro-batches of any shape, including `parallel.decoding.DecodingBatch`.
            objective: objective called with the logits, on ranks of the last pipeline stage; its result is not used.
        """
        ...

    def state(self) -> State:
        """Returns this rank's named shards: fp32 weights and optimizer states, valid until the next step.

        Raises:
            CheckpointError: a rank could not read the state that it offloads to a disk; raised on all ranks.
        """
        ...

    def load(self, directory: Path, *, fresh_optimizer: bool = False, files: ShardFiles | None = None) -> None:
        """Loads named shards that any engine wrote under any layout.

        Args:
            directory: the checkpoint's directory.
            fresh_optimizer: whether to set the optimizer's states to zero, as before the first step, because the
                checkpoint has another kind of optimizer.
            files: source of the checkpoint's files; None for its directory.
        """
        ...

    def close(self) -> None:
        """Releases the memory that references from outside Python would keep; the engine is not used any more."""
        ...

    def edit_state(self) -> AbstractContextManager[State]:
        """Yields this rank's named shards, to be changed in place; the engine uses the changed values after the block.

        Unlike the shards from `state`, they include every copy of tied weights that this rank has.
        """
        ...

    @property
    def decoders(self) -> list[Decoder]:
        """This rank's parts of the model, one per (virtual) pipeline stage; hooks on the modules see every pass."""
        ...

    def replicas(self) -> Iterator[Replica]:
        """Yields this rank's values that should be bit-identical on other ranks."""
        ...


class TrainsStepByStep:
    """Mixin with the `train_step` of an engine that has `begin_step`, and a `close` for one that Python frees."""

    def close(self) -> None:
        """Implements `Engine.close`."""

    def train_step(self, step: StepBatch, *, lr: float, limits: UpdateLimits = NO_LIMITS) -> StepResult:
        """Implements `Engine.train_step`."""
        begun: PendingStep = self.begin_step(step, lr=lr, limits=limits)  # type: ignore[attr-defined]
        return begun.result()


__all__ = [
    "NO_LIMITS",
    "NO_UPDATE",
    "Engine",
    "EvaluationSums",
    "ExchangesGradients",
    "FinishedStep",
    "GradientExchange",
    "HostValues",
    "Objective",
    "PendingStep",
    "Replica",
    "StepMeasure",
    "StepOutcome",
    "StepResult",
    "TrainsStepByStep",
    "UpdateLimits",
    "no_host_values",
]
