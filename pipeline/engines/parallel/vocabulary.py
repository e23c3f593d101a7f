"""Vocabulary-parallel cross-entropy: logits are sharded over ranks along the vocabulary, and never gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data.micro_batch import IGNORE


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's shard of the vocabulary: the ids of its logit columns.

    Attributes:
        group: the ranks that together have all shards; None if this rank has the full vocabulary.
        first: id of the first column.
    """

    group: dist.ProcessGroup | None = None
    first: int = 0


FULL_VOCABULARY = VocabularyShard()
"""The unsharded vocabulary, on one rank."""


def cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Sums -log p(target) and (log Z)^2 over targets, where Z is the sum of exp(logits); fp32.

    Args:
        logits: [B, T, V'], any float dtype.
        labels: int64 [B, T], IGNORE where there is no target.
        vocabulary: ids of the V' columns. All ranks of the group get the same sums.
    """
    nats, squares = _InPlaceCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocabulary)
    return nats, squares


def cross_entropy_gradient(
    logits: Tensor,
    labels: Tensor,
    vocabulary: VocabularyShard = FULL_VOCABULARY,
    *,
    nats_weight: float = 1.0,
    squares_weight: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the two sums of `cross_entropy`, and the gradient of their weighted sum with respect to the logits.

    Returns:
        The sums, and the gradient [B, T, V'], in fp32 (fp64 for fp64 logits).
    """
    softmax = _softmax(logits.flatten(0, -2), labels.flatten(), vocabulary)
    gradient = softmax.to_gradient(nats_weight, squares_weight)
    return softmax.nats, softmax.squares, gradient.view(logits.shape)


def target_nats(logits: Tensor, labels: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY) -> Tensor:
    """Returns -log p(target) of every position, fp32 [B x T], 0 without a target; arguments as in `cross_entropy`."""
    return _softmax(logits.flatten(0, -2), labels.flatten(), vocabulary, by_row=True).nats


class _Softmax(NamedTuple):
    """Values from which loss and gradient are computed, for N rows.

    Attributes:
        exp: [N, V'], exp(logits - highest logit of the row).
        z: [N], sum of exp over the whole vocabulary.
        counts: bool [N], rows with a target.
        here: bool [N], rows whose target is among this rank's columns.
        column: int64 [N, 1], column of the target; 0 if it is not on this rank.
        log_full: [N], log Z; 0 without a target.
        nats: sum of -log p(target); or, by row, [N] with 0 for rows without a target.
    """

    exp: Tensor
    z: Tensor
    counts: Tensor
    here: Tensor
    column: Tensor
    log_full: Tensor
    nats: Tensor

    @property
    def squares(self) -> Tensor:
        """The sum of (log Z)^2."""
        return self.log_full.square().sum()

    def to_gradient(self, per_nat: Tensor | float, per_square: Tensor | float) -> Tensor:
        """Overwrites `exp` with the gradient of per_nat x nats + per_square x squares."""
        factor = ((self.counts * per_nat + 2.0 * self.log_full * per_square) / self.z).unsqueeze(-1)
        at_target = (self.here * -per_nat).to(self.exp.dtype).unsqueeze(-1)
        if torch.compiler.is_compiling():
            # one kernel cannot both write the gradient and scatter into it: 6 bytes per logit instead of 22 (sm_90,
            # bf16)
            columns = torch.arange(self.exp.shape[-1], device=self.exp.device)
            return self.exp * factor + torch.where(columns == self.column, at_target, 0.0)
        return self.exp.mul_(factor).scatter_add_(-1, self.column, at_target)


def _softmax(logits: Tensor, labels: Tensor, vocabulary: VocabularyShard, *, by_row: bool = False) -> _Softmax:
    """Computes the values for logits [N, V'], labels int64 [N]; allocates one fp32 tensor of the logits' size."""
    counts = labels != IGNORE
    local = labels - vocabulary.first
    here = counts & (local >= 0) & (local < logits.shape[-1])
    column = local.masked_fill(~here, 0).unsqueeze(-1)
    highest = logits.amax(-1).float()
    if vocabulary.group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=vocabulary.group)
    at_target = (logits.gather(-1, column).squeeze(-1) - highest) * here
    exp = (logits - highest.unsqueeze(-1)).exp_()  # fp32 for every dtype of the logits, without a copy of them
    z = exp.sum(-1)
    if vocabulary.group is not None:
        both = torch.stack([at_target, z])
        dist.all_reduce(both, group=vocabulary.group)
        at_target, z = both.unbind()
    log_z = z.log()
    nats = (log_z - at_target) * counts
    if not by_row:
        nats = nats.sum()  # frees it before the next tensor of N rows
    return _Softmax(exp, z, counts, here, column, (log_z + highest) * counts, nats)


class _InPlaceCrossEntropy(torch.autograd.Function):
    """Saves one fp32 tensor of the logits' size for the backward pass, which turns it into the gradient in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: VocabularyShard) -> tuple[Tensor, Tensor]:
        softmax = _softmax(logits, labels, vocabulary)
        ctx.save_for_backward(*softmax)
        ctx.dtype, ctx.consumed = logits.dtype, False
        return softmax.nats, softmax.squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        assert not ctx.consumed, "a second backward pass is not possible: the first overwrote the saved tensor in place"
        ctx.consumed = True
        return _Softmax(*ctx.saved_tensors).to_gradient(*grads).to(ctx.dtype), None, None
