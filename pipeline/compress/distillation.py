"""Knowledge distillation objective: KL divergence to a frozen teacher's distribution, and cross-entropy with the data.

loss = alpha * t^2 * KL(teacher_t || student_t) + (1 - alpha) * cross-entropy, summed over target tokens, where the
index t means softmax(logits / t). The factor t^2 keeps the gradients of both terms on the same scale when t changes.
Source: Hinton, Vinyals and Dean 2015 (arXiv:1503.02531), section 2. The student's z-loss is added if the
config enables it.

The teacher is not sharded: every rank holds all of it, in the model dtype. Its logits are made from its last hidden
states together with the student's, so with a chunked loss they never exist as a whole either.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.schema import DistillSection
from pipeline.data.loader import IGNORE, MicroBatch
from pipeline.engines.objective import Loss
from pipeline.models.hf_config import read_hf_config
from pipeline.models.materialize import materialize
from pipeline.models.meta import build_meta
from pipeline.models.stored_values import FromSafetensors
from pipeline.parallel.architecture_check import has_separate_head
from pipeline.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard, cross_entropy, cross_entropy_gradient

_WHOLE_VOCABULARY = "refused by the rules: distillation needs the whole vocabulary on each rank"


class Distillation:
    """The distillation loss; holds the teacher.

    Args:
        section: teacher folder, temperature, alpha.
        bf16: run the teacher in bf16, else in fp32.
        attn_implementation: the student's.
        device: of this rank.
        z_loss: as `engines.objective.CrossEntropy`.

    Raises:
        DataError: the teacher's folder holds no complete model.
    """

    def __init__(
        self,
        section: DistillSection,
        *,
        bf16: bool,
        attn_implementation: str,
        device: torch.device,
        z_loss: float = 0.0,
    ) -> None:
        self._temperature, self._alpha, self._z_loss = section.temperature, section.alpha, z_loss
        self.parts = ("cross_entropy", "kl", "z_loss") if z_loss else ("cross_entropy", "kl")
        config = read_hf_config(section.teacher)
        dtype = torch.bfloat16 if bf16 else torch.float32
        self._teacher = build_meta(config, dtype=dtype, attn_implementation=attn_implementation)
        values = FromSafetensors(section.teacher, model=self._teacher)
        materialize(self._teacher, values, device=device)
        self._teacher.eval().requires_grad_(False)
        # an architecture that caps or scales its logits after the head gives them as a whole
        self._head = self._teacher.get_output_embeddings() if has_separate_head(config) else None  # type: ignore[operator]

    @torch.no_grad()
    def extra_targets(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """The teacher's last hidden states, [B, T, D]; of some architectures its logits, [B, T, V]."""
        at = {} if batch.positions is None else {"position_ids": batch.positions}
        if self._head is None:
            return (self._teacher(input_ids=batch.input_ids, use_cache=False, **at).logits,)
        base: Any = self._teacher.base_model
        return (base(input_ids=batch.input_ids, use_cache=False, **at).last_hidden_state,)

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """Loss of the student's logits; its parts are the cross-entropy, the KL term (without t^2) and the z-loss."""
        assert vocabulary.group is None, _WHOLE_VOCABULARY
        ce, squares = cross_entropy(logits, labels)
        kl = kl_sum(self._teacher_logits(*extra_targets), logits, labels, temperature=self._temperature)
        return self._sums(ce, kl, squares)

    def with_gradient(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> tuple[Loss, Tensor]:
        """See `Objective.with_gradient`."""
        assert vocabulary.group is None, _WHOLE_VOCABULARY
        ce, squares, gradient = cross_entropy_gradient(
            logits, labels, nats_weight=1 - self._alpha, squares_weight=self._z_loss
        )
        teacher = self._teacher_logits(*extra_targets)
        kl, kl_gradient = kl_gradient_sum(teacher, logits, labels, temperature=self._temperature)
        gradient.add_(kl_gradient, alpha=self._alpha * self._temperature**2)
        return self._sums(ce, kl, squares), gradient

    def _teacher_logits(self, extra_target: Tensor) -> Tensor:
        if self._head is None:
            return extra_target
        logits: Tensor = self._head(extra_target)
        return logits

    def _sums(self, ce: Tensor, kl: Tensor, squares: Tensor) -> Loss:
        total = self._alpha * self._temperature**2 * kl + (1 - self._alpha) * ce
        if not self._z_loss:
            return Loss(total, (ce.detach(), kl.detach()))
        z = self._z_loss * squares
        return Loss(total + z, (ce.detach(), kl.detach(), z.detach()))


def kl_sum(teacher: Tensor, student: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Sum over target positions of KL(softmax(teacher / t) || softmax(student / t)), nats, fp32.

    Args:
        teacher, student: logits [B, T, V].
        labels: int64 [B, T]; positions with IGNORE are left out.
    """
    log_p = F.log_softmax(teacher.float() / temperature, dim=-1)
    log_q = F.log_softmax(student.float() / temperature, dim=-1)
    per_position = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    return (per_position * (labels != IGNORE)).sum()


def kl_gradient_sum(teacher: Tensor, student: Tensor, labels: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """`kl_sum`, and its gradient with respect to the student's logits.

    Returns:
        The sum, and (softmax(student / t) - softmax(teacher / t)) / t, 0 without a target: fp32 [B, T, V].
    """
    counts = labels != IGNORE
    log_p = F.log_softmax(teacher.float() / temperature, dim=-1)
    log_q = F.log_softmax(student.float() / temperature, dim=-1)
    per_position = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    gradient = log_q.exp_().sub_(log_p.exp_()).mul_((counts / temperature).unsqueeze(-1))
    return (per_position * counts).sum(), gradient
