"""The objective of knowledge distillation: divergence from a frozen teacher, and cross-entropy with the data.

loss = alpha t^2 D(teacher_t, student_t) + (1 - alpha) cross-entropy, summed over target tokens, where the index t means
softmax(logits / t). The factor t^2 keeps the gradients of both terms on the same scale when t changes. Source: Hinton,
Vinyals and Dean 2015 (arXiv:1503.02531), section 2. The student's z-loss is added if the config enables it.

The teacher's logits are computed from its last hidden states, chunk by chunk together with the student's. With a
chunked loss neither model's logits exist as a whole.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.config.sections.compression import DistillSection
from pipeline.data.micro_batch import MicroBatch
from pipeline.engines.objective import Loss
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard, cross_entropy, cross_entropy_gradient
from pipeline.run.distillation.divergence import Divergence

PARTS = {"forward_kl": "kl", "reverse_kl": "reverse_kl", "jsd": "jsd"}
"""Divergence -> its name in `metrics.jsonl`."""


class Reference(Protocol):
    """The reference of a student: a teacher in memory, or its cached logits."""

    def targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns targets for `Objective.extra_targets`."""
        ...

    def compare(
        self, divergence: Divergence, logits: Tensor, labels: Tensor, *targets: Tensor, vocabulary: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        """Computes the divergence summed over targets, and its gradient with respect to the logits."""
        ...


class Distillation:
    """The distillation loss; an `engines.objective.Objective`.

    Args:
        section: divergence, temperature, alpha.
        reference: the teacher, or its cached logits.
        z_loss: weight of the sum of (log Z)^2; 0 is off (see `engines.objective.CrossEntropy`).
    """

    def __init__(self, section: DistillSection, reference: Reference, *, z_loss: float = 0.0) -> None:
        self._reference, self._alpha, self._z_loss = reference, section.alpha, z_loss
        self._divergence = Divergence(section.divergence, section.temperature, section.beta)
        self._weight = section.alpha * section.temperature**2
        parts = ("cross_entropy", PARTS[section.divergence])
        self.parts = (*parts, "z_loss") if z_loss else parts

    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Returns the teacher's last hidden states, its logits, or its cached logits."""
        return self._reference.targets(batch)

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Computes the loss of the student's logits, and its parts: cross-entropy, divergence (without t^2), z-loss."""
        ce, squares = cross_entropy(logits, labels, vocabulary)
        return self._sums(ce, _Compared.apply(logits, labels, extra_targets, self, vocabulary), squares)

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """Implements `Objective.with_gradient`."""
        ce, squares, gradient = cross_entropy_gradient(
            logits, labels, vocabulary, nats_weight=1 - self._alpha, squares_weight=self._z_loss
        )
        divergence, own = self.compared(logits, labels, *extra_targets, vocabulary=vocabulary)
        gradient.add_(own, alpha=self._weight)
        return self._sums(ce, divergence, squares), gradient

    def compared(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        """Computes the divergence and its gradient (see `Reference.compare`)."""
        return self._reference.compare(self._divergence, logits, labels, *extra_targets, vocabulary=vocabulary)

    def _sums(self, ce: Tensor, divergence: Tensor, squares: Tensor) -> Loss:
        total = self._weight * divergence + (1 - self._alpha) * ce
        if not self._z_loss:
            return Loss(total, (ce.detach(), divergence.detach()))
        z = self._z_loss * squares
        return Loss(total + z, (ce.detach(), divergence.detach(), z.detach()))


class _Compared(torch.autograd.Function):
    """The divergence with its precomputed gradient: saves one fp32 tensor of the logits' size."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        extra_targets: tuple[Tensor, ...],
        objective: Distillation,
        vocabulary: VocabularyShard,
    ) -> Tensor:
        value, gradient = objective.compared(logits, labels, *extra_targets, vocabulary=vocabulary)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = ctx.saved_tensors
        return (gradient * grads[0]).to(ctx.dtype), None, None, None, None
