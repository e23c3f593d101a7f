"""Dynamic loss scaling for fp16 mixed precision: keeps small gradients from underflowing to zero.

The loss is multiplied by a scale before the backward pass and the gradients are divided by it afterwards. A step whose
gradients overflow is skipped and the scale lowered; after `loss_scale_window` steps without overflow it is doubled.
Source: Micikevicius et al. 2018, Mixed Precision Training (arXiv:1710.03740), section 3.2; the rules and keys are those
of DeepSpeed's `fp16` section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foundation.errors import TrainingError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.sections.deepspeed import Fp16Section
from pipeline.engines.base import StepOutcome, StepResult, UpdateLimits


class LossScaler:
    """The loss scale of one run, the same on every rank.

    Args:
        section: the config's `fp16`; if it is not enabled, the scale is always 1.

    Attributes:
        value: the factor on the loss.
    """

    def __init__(self, section: Fp16Section) -> None:
        self._section, self.enabled = section, section.enabled
        self._dynamic = section.enabled and section.loss_scale == 0
        self.value = 1.0
        if section.enabled:
            self.value = section.loss_scale or 2.0**section.initial_scale_power
        self._hysteresis_left, self._good_steps = section.hysteresis, 0

    def result(
        self,
        step: int,
        means: Sequence[float],
        names: Sequence[str],
        norm: float,
        outcome: StepOutcome,
        *,
        host_sums: Sequence[float] = (),
    ) -> StepResult:
        """Builds the result of a step and updates the scale after it.

        Args:
            step: number of the step.
            means: means of the loss and its parts over the targets of the step.
            names: names of the parts.
            norm: 2-norm of the global gradient, unscaled.
            outcome: the step's outcome, from the method `outcome`.
            host_sums: sums of the step's `HostValues` over all ranks.

        Raises:
            TrainingError: an overflow at the smallest scale.
        """
        used = self.value if self.enabled else None
        if outcome in (StepOutcome.APPLIED, StepOutcome.OVERFLOW):
            self.update(step, overflow=outcome is StepOutcome.OVERFLOW)
        loss, *parts = means
        named = dict(zip(names, parts, strict=True))
        return StepResult(loss, named, norm, outcome, loss_scale=used, host_sums=tuple(host_sums))

    def update(self, step: int, *, overflow: bool) -> None:
        """Updates the scale after a step.

        Args:
            step: number of the step.
            overflow: whether the step's gradients were not finite.

        Raises:
            TrainingError: an overflow at the smallest scale.
        """
        if not self._dynamic:
            return
        if overflow:
            self._good_steps = 0
            self._lower(step)
            return
        self._good_steps += 1
        if self._section.consecutive_hysteresis:
            self._hysteresis_left = self._section.hysteresis
        if self._good_steps % self._section.loss_scale_window == 0:
            self._hysteresis_left = self._section.hysteresis
            self.value *= 2.0

    def _lower(self, step: int) -> None:
        if self._hysteresis_left > 1:
            self._hysteresis_left -= 1
            return
        if self.value <= self._section.min_loss_scale:
            raise TrainingError(
                f"step {step}: the gradients overflow fp16 at the smallest loss scale, {self.value:g}\n"
                f"  the last checkpoint is untouched; try: bf16, a lower fp16.min_loss_scale, a lower"
                f" optimizer.params.lr, or inspect the samples of this step"
            )
        self.value = max(self.value / 2.0, self._section.min_loss_scale)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns `to_tensor` under its checkpoint key; empty if loss scaling is off."""
        return {named_state.LOSS_SCALE: self.to_tensor()} if self.enabled else {}

    def load_state_dict(self, state: Mapping[str, NamedShard | Tensor]) -> None:
        """Restores the state from a dict made by `state_dict`, into which a checkpoint has been read."""
        saved = state.get(named_state.LOSS_SCALE)
        if isinstance(saved, Tensor):
            self.load_tensor(saved)

    def to_tensor(self) -> Tensor:
        """Returns fp64 [3]: scale, steps since the last overflow, overflows left before it is lowered (hysteresis)."""
        return torch.tensor([self.value, self._good_steps, self._hysteresis_left], dtype=torch.float64)

    def load_tensor(self, state: Tensor) -> None:
        """Restores the state from a result of `to_tensor`; a static scale keeps the config's value."""
        if self._dynamic:
            value, good_steps, hysteresis_left = state.tolist()
            self.value, self._good_steps, self._hysteresis_left = value, int(good_steps), int(hysteresis_left)

    def outcome(self, loss: float, norm: float, limits: UpdateLimits) -> StepOutcome:
        """Decides whether a step with a fully reduced gradient is applied; only `APPLIED` may reach the weights."""
        return limits.outcome(loss, norm, scaled=self.enabled)

    def factor(self, norm: float, clip: float) -> float:
        """Returns the factor on the gradients of the scaled loss before the update; see `update_factor`."""
        return update_factor(norm, clip=clip, scale=self.value)


def update_factor(norm: float, *, clip: float, scale: float) -> float:
    """Returns the factor on the gradients that removes the loss scale and clips by global norm.

    Args:
        norm: 2-norm of the global gradient, unscaled; finite.
        clip: the largest norm; 0 for no clipping. DeepSpeed's rule, with its 1e-6.
        scale: the loss scale.
    """
    assert math.isfinite(norm)
    excess = max(1.0, (norm + 1e-6) / clip) if clip > 0 else 1.0
    return 1.0 / (excess * scale)
