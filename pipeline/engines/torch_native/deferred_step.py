"""A step in which the device decides whether the update is applied and how far gradients are clipped.

torch's fused optimizers accept both as tensors: gradients are divided by `grad_scale`, and if `found_inf` is 1 nothing
changes, step counters included. So the host need not read a number before it begins the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.data.micro_batch import StepBatch
from pipeline.engines.base import PendingStep, StepMeasure, StepOutcome, StepResult, UpdateLimits
from pipeline.engines.loss_scale import LossScaler
from pipeline.engines.optim.groups import set_learning_rate
from pipeline.runtime.launch.host_copy import HostCopy


@dataclass(frozen=True)
class UpdateDecision:
    """The device's decision about an update.

    Attributes:
        vetoed: whether nothing may change, bool scalar.
        grad_scale: fp32 scalar by which gradients are divided: the loss scale, times norm / clipping norm if above 1.
    """

    vetoed: Tensor
    grad_scale: Tensor

    def step(self, optimizer: torch.optim.Optimizer, *, lr: float) -> None:
        """Makes the optimizer's step unless it is vetoed. The optimizer must support `grad_scale` and `found_inf`."""
        set_learning_rate(optimizer, lr)
        taking: Any = optimizer
        taking.grad_scale, taking.found_inf = self.grad_scale, self.vetoed.float()
        optimizer.step()
        taking.grad_scale = taking.found_inf = None


def decide(
    loss: Tensor, norm: Tensor, *, limits: UpdateLimits, clip: float, scale: float, after: PendingStep | None
) -> UpdateDecision:
    """Decides about an update as `UpdateLimits.outcome` does, on the device.

    Args:
        loss: fp64 scalar, over all ranks.
        norm: norm of the unscaled global gradient, fp64 scalar.
        limits: largest loss and gradient norm with which the update is made.
        clip: the largest norm; 0 for no clipping. DeepSpeed's rule, with its 1e-6: see `update_factor`.
        scale: the loss scale.
        after: the previous step, if its result is unknown: its veto applies to this step, too. None otherwise.
    """
    allowed = torch.isfinite(loss) & torch.isfinite(norm) & (loss <= limits.loss) & (norm <= limits.grad_norm)
    vetoed = ~allowed
    if isinstance(after, DeferredStep):
        vetoed |= after.vetoed
    excess = ((norm + 1e-6) / clip).clamp(min=1.0) if clip > 0 else torch.ones_like(norm)
    return UpdateDecision(vetoed, (excess * scale).float())


class DeferredStep:
    """A step that was begun, whose numbers are being copied to the host. Collective with a mixture of experts.

    Args:
        step: the step's batch.
        numbers: fp64 on the device: means of the loss and its parts, gradient norm, sums of the host values.
        decision: the device's decision about the update.
        names: names of the loss's parts.
        limits: largest loss and gradient norm with which the update is made.
        scaler: the run's loss scaler, which gets the outcome.
        measures: measures of the step, which end with the step.
    """

    def __init__(
        self,
        step: StepBatch,
        numbers: Sequence[Tensor],
        decision: UpdateDecision,
        *,
        names: Sequence[str],
        limits: UpdateLimits,
        scaler: LossScaler,
        measures: Sequence[StepMeasure],
    ) -> None:
        self.vetoed = decision.vetoed
        self._step, self._names, self._limits = step.step, names, limits
        self._scaler, self._measures = scaler, measures
        measured = [each.end_step(targets=step.targets, vetoed=decision.vetoed) for each in measures]
        numbers = [*numbers, *measured]
        self._sizes = [each.numel() for each in numbers]
        self._copy = HostCopy(torch.cat([each.reshape(-1) for each in numbers]))
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Implements `PendingStep.result`."""
        if self._result is None:
            values = iter(self._copy.read())
            means, (norm,), host, *measured = [[next(values) for _ in range(size)] for size in self._sizes]
            outcome: StepOutcome = self._scaler.outcome(means[0], norm, self._limits)
            result = self._scaler.result(self._step, means, self._names, norm, outcome, host_sums=host)
            parts = dict(result.parts)
            for each, numbers in zip(self._measures, measured, strict=True):
                parts |= each.parts(numbers)
            self._result = replace(result, parts=parts)
        return self._result
