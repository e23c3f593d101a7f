"""The objective of on-policy distillation: divergence on tokens sampled by the student, both terms on data.

    loss = sum over data targets of alpha t^2 D + (1 - alpha) cross-entropy,  plus  sum over sampled targets of t^2 D

A sampled token is not a label: its position has no cross-entropy, and counts as much as a data position. There is
no gradient through the sampling. Source: Agarwal et al. 2023, GKD (arXiv:2306.13649), section 3.1 and algorithm 1, but
mixed by sample rather than by batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.config.sections.compression import DistillSection
from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.engines.objective import Loss
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard, cross_entropy_gradient
from pipeline.run.distillation.divergence import Divergence
from pipeline.run.distillation.objective import PARTS
from pipeline.run.distillation.teacher import Teacher

SHARE = "on_policy_share"
"""Name of the loss part that counts sampled targets; its mean is the share of sampled targets in the step."""


class OnPolicyDistillation:
    """The loss of a batch with sampled targets; an `engines.objective.Objective`.

    Args:
        section: divergence, temperature, alpha.
        teacher: the teacher in memory.
        z_loss: weight of the sum of (log Z)^2 over data targets; 0 is off (see `engines.objective.CrossEntropy`).
    """

    def __init__(self, section: DistillSection, teacher: Teacher, *, z_loss: float = 0.0) -> None:
        self._teacher, self._alpha, self._z_loss = teacher, section.alpha, z_loss
        self._divergence = Divergence(section.divergence, section.temperature, section.beta)
        self._square = section.temperature**2
        self._name = PARTS[section.divergence]
        parts = ("cross_entropy", self._name, f"on_policy_{self._name}", SHARE)
        self.parts = (*parts, "z_loss") if z_loss else parts

    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns the mask of sampled targets, bool [B, T], and the teacher's targets."""
        assert batch.sampled is not None
        return (batch.sampled, *self._teacher.targets(batch))

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Implements `Objective.__call__`."""
        total, *parts = _WithGradient.apply(logits, labels, extra_targets, self, vocabulary)
        return Loss(total, tuple(parts))

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """Implements `Objective.with_gradient`."""
        sampled, *targets = extra_targets
        of_data = labels.masked_fill(sampled, IGNORE)
        ce, squares, gradient = cross_entropy_gradient(
            logits, of_data, vocabulary, nats_weight=1 - self._alpha, squares_weight=self._z_loss
        )
        nats, own = self._teacher.compare_by_position(self._divergence, logits, labels, *targets, vocabulary=vocabulary)
        weight = torch.where(sampled, self._square, self._square * self._alpha).to(nats.dtype)
        gradient.addcmul_(own, weight.unsqueeze(-1))
        total = (weight * nats).sum() + (1 - self._alpha) * ce + self._z_loss * squares
        count = ((labels != IGNORE) & sampled).sum().to(nats.dtype)
        parts = (ce, (nats * ~sampled).sum(), (nats * sampled).sum(), count)
        return Loss(total, (*parts, self._z_loss * squares) if self._z_loss else parts), gradient


def own_means(means: dict[str, float], section: DistillSection) -> dict[str, float]:
    """Converts means of the parts over all targets of a step to means over their own (data or sampled) targets.

    Args:
        means: mean of each part by name; other values are passed on.
        section: the config's `distill`.
    """
    name, share = PARTS[section.divergence], means[SHARE]
    of_data = dict.fromkeys(("cross_entropy", name, "z_loss"), 1 - share)
    divisors = {**of_data, f"on_policy_{name}": share}
    kept = {key: value for key, value in means.items() if divisors.get(key, 1.0) > 0}  # otherwise it has no target
    return {key: value / divisors.get(key, 1.0) for key, value in kept.items()}


class _WithGradient(torch.autograd.Function):
    """A loss with its precomputed gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        extra_targets: tuple[Tensor, ...],
        objective: OnPolicyDistillation,
        vocabulary: VocabularyShard,
    ) -> tuple[Tensor, ...]:
        loss, gradient = objective.with_gradient(logits, labels, *extra_targets, vocabulary=vocabulary)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(*loss.parts)
        return loss.total, *loss.parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = ctx.saved_tensors
        return (gradient * grads[0]).to(ctx.dtype), None, None, None, None
