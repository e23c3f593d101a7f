"""Loss scaling for fp16: small gradients are lifted out of the range that half precision rounds to zero.

The loss is multiplied by a scale before the backward pass and the gradients are divided by it afterwards. A step whose
gradients are not finite is skipped and the scale lowered; after a while without that it is doubled. Source:
Micikevicius et al. 2018, Mixed Precision Training (arXiv:1710.03740), section 3.2; the rules and keys are those of
DeepSpeed's `fp16` section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.base.errors import TrainingError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.shards import NamedShard
from pipeline.config.deepspeed_schema import Fp16Section
from pipeline.engines.base import Gate, StepOutcome, StepResult


class LossScale:
    """The scale of one run, the same on every rank.

    Args:
        section: the config's `fp16`; a scale of 1 that never changes when it is not enabled.

    Attributes:
        value: what the loss is multiplied by.
    """

    def __init__(self, section: Fp16Section) -> None:
        self._section, self.enabled = section, section.enabled
        self._dynamic = section.enabled and section.loss_scale == 0
        self.value = 1.0
        if section.enabled:
            self.value = section.loss_scale or 2.0**section.initial_scale_power
        self._left, self._good = section.hysteresis, 0

    def outcome(self, loss: float, norm: float, allow: Gate) -> StepOutcome:
        """What is to become of a step whose gradient is complete; only `APPLIED` may reach the weights.

        A loss that is not finite is no overflow of fp16's scale: it comes from the forward pass, where nothing is
        scaled.
        """
        if not allow(loss, norm):
            return StepOutcome.REFUSED
        if not math.isfinite(loss):
            return StepOutcome.NON_FINITE
        if not math.isfinite(norm):
            return StepOutcome.OVERFLOW if self.enabled else StepOutcome.NON_FINITE
        return StepOutcome.APPLIED

    def result(
        self, step: int, means: Sequence[float], names: Sequence[str], norm: float, outcome: StepOutcome
    ) -> StepResult:
        """What a step did; takes note of how it went.

        Args:
            step: its number.
            means: of the loss and its parts, over the targets of the step.
            names: of the parts.
            norm: of the whole gradient, unscaled.
            outcome: as `outcome` said.

        Raises:
            TrainingError: an overflow at the smallest scale.
        """
        used = self.value if self.enabled else None
        if outcome in (StepOutcome.APPLIED, StepOutcome.OVERFLOW):
            self.update(step, overflow=outcome is StepOutcome.OVERFLOW)
        loss, *parts = means
        return StepResult(loss, dict(zip(names, parts, strict=True)), norm, outcome, loss_scale=used)

    def update(self, step: int, *, overflow: bool) -> None:
        """Takes note of how a step went.

        Args:
            step: its number.
            overflow: its gradients were not finite.

        Raises:
            TrainingError: an overflow at the smallest scale.
        """
        if not self._dynamic:
            return
        if overflow:
            self._good = 0
            self._lower(step)
            return
        self._good += 1
        if self._section.consecutive_hysteresis:
            self._left = self._section.hysteresis
        if self._good % self._section.loss_scale_window == 0:
            self._left = self._section.hysteresis
            self.value *= 2.0

    def _lower(self, step: int) -> None:
        if self._left > 1:
            self._left -= 1
            return
        if self.value <= self._section.min_loss_scale:
            raise TrainingError(
                f"step {step}: the gradients overflow fp16 at the smallest loss scale, {self.value:g}\n"
                f"  the last checkpoint is untouched; try: bf16, a lower fp16.min_loss_scale, a lower"
                f" optimizer.params.lr, or look at the samples of this step"
            )
        self.value = max(self.value / 2.0, self._section.min_loss_scale)

    def named(self) -> dict[str, Tensor]:
        """`state` under its key in a checkpoint; nothing when the scale is off."""
        return {named_state.LOSS_SCALE: self.state()} if self.enabled else {}

    def take_up(self, state: Mapping[str, NamedShard | Tensor]) -> None:
        """Goes on from a checkpoint that has been read into what `named` gave."""
        read = state.get(named_state.LOSS_SCALE)
        if isinstance(read, Tensor):
            self.load(read)

    def state(self) -> Tensor:
        """fp64 [3], for a checkpoint: the scale, steps since the last overflow, overflows before it is lowered."""
        return torch.tensor([self.value, self._good, self._left], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Goes on from what `state` returned; a fixed scale stays what the config says."""
        if self._dynamic:
            value, good, left = state.tolist()
            self.value, self._good, self._left = value, int(good), int(left)

    def factor(self, norm: float, clip: float) -> float:
        """What gradients of the scaled loss are multiplied by before the update.

        Args:
            norm: of the whole gradient, unscaled.
            clip: the largest norm; 0 is no clipping. DeepSpeed's rule, with its 1e-6.
        """
        return update_factor(norm, clip=clip, scale=self.value)


def update_factor(norm: float, *, clip: float, scale: float) -> float:
    """What gradients are multiplied by before the update: without the loss scale, and clipped.

    Args:
        norm: of the whole gradient, unscaled; finite.
        clip: the largest norm; 0 is no clipping. DeepSpeed's rule, with its 1e-6.
        scale: what the loss was multiplied by.
    """
    assert math.isfinite(norm)
    excess = max(1.0, (norm + 1e-6) / clip) if clip > 0 else 1.0
    return 1.0 / (excess * scale)
