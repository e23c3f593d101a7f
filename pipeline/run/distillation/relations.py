"""Losses between relations of tokens, which two models of any widths have in common, with gradients by hand.

A relation of vectors x_i of a sequence is a matrix over pairs of tokens. In a causal model token i is related with the
tokens j up to i of its own document. Per row i, with s the student's and t the teacher's relation:

| kind | relation | loss of a row |
|---|---|---|
| kl | softmax over j of x_i x_j / sqrt(d) | KL(t_i, s_i), averaged over the relation heads |
| similarity | x_i x_j, of vectors of length 1 | mean over j of (s_ij - t_ij)^2 |

Sources: self-attention relations, Wang et al. 2021, MiniLMv2 (arXiv:2012.15828), section 3.1; similarities, Tung and
Mori 2019 (arXiv:1907.09682), whose matrices are over samples and normalized by row; here vectors are normalized.

The S x S matrices exist for only some rows at a time: the forward pass computes the gradient, and keeps nothing else.

Shapes: B samples, R relation heads, T rows of this rank, S columns, d features of a relation head (student and teacher
may differ in it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["kl", "similarity"]

SCORES = 1 << 23
"""Number of elements of a relation that exist at a time, over all samples and heads; about 6 fp32 copies: 0.2 GiB."""


@dataclass(frozen=True)
class Pairs:
    """The related tokens, and the weight of each row.

    Attributes:
        rows, columns: int64 [T], [S], positions in the sequence.
        weights: fp32 [B, T], factor on the loss of every row; 0 leaves it out.
        documents: int [B, positions of the whole sequence]; None for one document.
    """

    rows: Tensor
    columns: Tensor
    weights: Tensor
    documents: Tensor | None = None

    def hidden(self, first: int, end: int) -> Tensor:
        """Returns the mask of the columns not related with rows `first` to `end`, bool [B or 1, 1, end - first, S]."""
        rows = self.rows[first:end]
        later = (self.columns[None, :] > rows[:, None])[None]
        if self.documents is not None:
            later = later | (self.documents[:, rows, None] != self.documents[:, None, self.columns])
        return later[:, None]


@dataclass(frozen=True)
class Vectors:
    """The vectors of one model.

    Attributes:
        rows: [B, R, T, d].
        columns: [B, R, S, d].
    """

    rows: Tensor
    columns: Tensor

    def scores(self, first: int, end: int) -> Tensor:
        """Computes inner products [B, R, end - first, S] in fp32 (fp64 for fp64 inputs)."""
        return _exact(self.rows[:, :, first:end]) @ _exact(self.columns).transpose(-1, -2)


def relation_loss(kind: Kind, student: Vectors, teacher: Vectors, pairs: Pairs) -> Tensor:
    """Computes the loss summed over weighted rows: scalar, fp32 (fp64 for fp64 inputs).

    Args:
        kind: one of the kinds in the module's table.
        student: the student's vectors, which get the gradient.
        teacher: the teacher's vectors, with the same number of relation heads.
        pairs: the related tokens, and the weight of each row.
    """
    loss: Tensor = _RelationLoss.apply(student.rows, student.columns, teacher, pairs, kind)
    return loss


class _RelationLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor, teacher: Vectors, pairs: Pairs, kind: Kind) -> Tensor:
        student, needed = Vectors(rows, columns), any(ctx.needs_input_grad)
        row_gradients, column_gradient = [], torch.zeros_like(_exact(columns)) if needed else None
        total = rows.new_zeros((), dtype=_exact_dtype(rows))
        step = max(1, SCORES // (rows.shape[0] * rows.shape[1] * columns.shape[2]))
        for first in range(0, rows.shape[2], step):
            end = min(first + step, rows.shape[2])
            loss, slope = _LOSSES[kind](student, teacher, pairs, first, end)
            total += loss
            if column_gradient is not None:
                row_gradients.append(slope @ _exact(columns))
                column_gradient += slope.transpose(-1, -2) @ _exact(rows[:, :, first:end])
        if needed:
            ctx.save_for_backward(torch.cat(row_gradients, dim=2), column_gradient)
            ctx.dtypes = rows.dtype, columns.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, of_columns = ctx.saved_tensors
        return (of_rows * grads[0]).to(ctx.dtypes[0]), (of_columns * grads[0]).to(ctx.dtypes[1]), None, None, None


def _kl(student: Vectors, teacher: Vectors, pairs: Pairs, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Computes the loss of some rows, and its gradient with respect to the student's inner products."""
    hidden, scale = pairs.hidden(first, end), student.rows.shape[-1] ** -0.5
    log_s, log_t = (
        each.scores(first, end).mul_(each.rows.shape[-1] ** -0.5).masked_fill_(hidden, -torch.inf).log_softmax(-1)
        for each in (student, teacher)
    )
    t = log_t.exp()
    weights = pairs.weights[:, None, first:end].to(t.dtype) / student.rows.shape[1]
    rows = (t * (log_t - log_s).masked_fill_(hidden, 0.0)).sum(-1)
    return (rows * weights).sum(), log_s.exp_().sub_(t).mul_((weights * scale).unsqueeze(-1))


def _similarity(student: Vectors, teacher: Vectors, pairs: Pairs, first: int, end: int) -> tuple[Tensor, Tensor]:
    hidden = pairs.hidden(first, end)
    difference = student.scores(first, end).sub_(teacher.scores(first, end)).masked_fill_(hidden, 0.0)
    count = (~hidden).sum(-1) * student.rows.shape[1]
    weights = pairs.weights[:, None, first:end].to(difference.dtype) / count
    loss = (difference.square().sum(-1) * weights).sum()
    return loss, difference.mul_(2 * weights.unsqueeze(-1))


_LOSSES = {"kl": _kl, "similarity": _similarity}


def _exact_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(_exact_dtype(tensor))
