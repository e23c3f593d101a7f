"""Vocabulary-parallel cross-entropy: the logits are sharded over ranks along the vocabulary, and never gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data.loader import IGNORE


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's shard of the vocabulary: which ids its columns of the logits are.

    Attributes:
        group: the ranks that hold all shards; None when this rank has the full vocabulary.
        first: id of the first column.
    """

    group: dist.ProcessGroup | None = None
    first: int = 0


FULL_VOCABULARY = VocabularyShard()
"""The vocabulary is not sharded."""


def cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Sums over targets of -log p(target) and of (log Z)^2, Z being the sum of exp(logits); fp32.

    Args:
        logits: [B, T, V'], any float dtype.
        labels: int64 [B, T], IGNORE where there is no target.
        vocabulary: which ids the V' columns are. All ranks of its group get the same sums.
    """
    nats, squares = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocabulary)
    return nats, squares


class _CrossEntropy(torch.autograd.Function):
    """Saves one fp32 tensor of the logits' size for the backward pass, which turns it into the gradient in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: VocabularyShard) -> tuple[Tensor, Tensor]:
        counts = labels != IGNORE
        local = labels - vocabulary.first
        here = counts & (local >= 0) & (local < logits.shape[-1])
        column = local.masked_fill(~here, 0).unsqueeze(-1)
        highest = logits.amax(-1).float()
        if vocabulary.group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=vocabulary.group)
        scores = logits - highest.unsqueeze(-1)  # fp32 whatever the dtype of the logits, without a copy of them
        at_target = scores.gather(-1, column).squeeze(-1) * here
        exp = scores.exp_()
        z = exp.sum(-1)
        if vocabulary.group is not None:
            both = torch.stack([at_target, z])
            dist.all_reduce(both, group=vocabulary.group)
            at_target, z = both.unbind()
        log_z = z.log()
        log_full = (log_z + highest) * counts
        ctx.save_for_backward(exp, z, counts, here, column, log_full)
        ctx.dtype, ctx.consumed = logits.dtype, False
        return ((log_z - at_target) * counts).sum(), log_full.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        assert not ctx.consumed, "a second backward pass is not possible: the first overwrote the saved tensor in place"
        ctx.consumed = True
        gradient, z, counts, here, column, log_full = ctx.saved_tensors
        per_nat, per_square = grads
        gradient.mul_(((counts * per_nat + 2.0 * log_full * per_square) / z).unsqueeze(-1))
        gradient.scatter_add_(-1, column, (here * -per_nat).unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None
