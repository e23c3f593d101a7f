"""Divergences between the distributions of teacher and student, with gradients by hand and a sharded vocabulary.

Notation: p the teacher's probabilities, q the student's, both softmax(logits / t), m = beta p + (1 - beta) q.

| divergence | sum over the vocabulary | g = q dD/dq |
|---|---|---|
| forward KL(p, q) | p (log p - log q) | -p |
| reverse KL(q, p) | q (log q - log p) | q (log q - log p + 1) |
| JSD, generalized | beta p (log p - log m) + (1 - beta) q (log q - log m) | (1 - beta) q (log q - log m) |

With G the sum of g, the gradient with respect to a logit of the student is (g - q G) / t, since d log q_i / d z_j is
(1[i = j] - q_j) / t. Forward KL covers all tokens that the teacher may give, reverse KL concentrates on its likeliest
tokens; JSD is between them. Sources: Hinton et al. 2015 (arXiv:1503.02531), section 2; Gu et al. 2023, MiniLLM
(arXiv:2306.08543); Agarwal et al. 2023, GKD (arXiv:2306.13649), equation 1.

With tensor parallelism a rank holds V' columns of both logits. The logarithms of the partition functions and the sums
over the vocabulary are all-reduced; logits are never gathered.

Shapes: N.. any leading dims, V' columns of this rank's shard of the vocabulary, k ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.data.micro_batch import IGNORE
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Divergence:
    """A divergence at a temperature.

    Attributes:
        kind: one of the divergences in the module's table.
        temperature: temperature of both distributions, t.
        beta: weight of the teacher in the mixture m, between 0 and 1; used by JSD only.
    """

    kind: Kind = "forward_kl"
    temperature: float = 1.0
    beta: float = 0.5

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the terms of the sum and g, elementwise; all log-probabilities must be finite."""
        if self.kind == "forward_kl":
            p = log_p.exp()
            return (log_p - log_q).mul_(p), p.neg_()
        if self.kind == "reverse_kl":
            q = log_q.exp()
            each = (log_q - log_p).mul_(q)
            return each, q.add_(each)
        log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        own = (log_q - log_m).mul_(log_q.exp()).mul_(1 - self.beta)
        return (log_p - log_m).mul_(log_p.exp()).mul_(self.beta).add_(own), own


def divergence_and_gradient(
    divergence: Divergence,
    teacher: Tensor,
    student: Tensor,
    labels: Tensor,
    vocabulary: VocabularyShard = FULL_VOCABULARY,
) -> tuple[Tensor, Tensor]:
    """Computes the divergence summed over target positions, and its gradient (see `divergence_by_position`)."""
    nats, gradient = divergence_by_position(divergence, teacher, student, labels, vocabulary)
    return nats.sum(), gradient


def divergence_by_position(
    divergence: Divergence,
    teacher: Tensor,
    student: Tensor,
    labels: Tensor,
    vocabulary: VocabularyShard = FULL_VOCABULARY,
) -> tuple[Tensor, Tensor]:
    """Computes every target position's divergence, and the gradient of their sum with respect to the student's logits.

    Args:
        divergence: the divergence and its temperature.
        teacher, student: logits [N.., V'], any float dtype.
        labels: int64 [N..]; positions with IGNORE are left out and have gradient 0.
        vocabulary: the ids of the V' columns. All ranks of its group get the same values.

    Returns:
        Nats [N..], 0 where there is no target, and the gradient [N.., V'], in fp32 (fp64 for fp64 logits).
    """
    log_p, log_q = _log_probabilities((teacher, student), divergence.temperature, vocabulary)
    counts = labels != IGNORE
    each, g = divergence.terms(log_p, log_q)
    del log_p
    sums = _sum(torch.stack([each.sum(-1), g.sum(-1)]), vocabulary)
    del each
    gradient = g.sub_(log_q.exp_().mul_(sums[1].unsqueeze(-1)))
    return sums[0] * counts, gradient.mul_((counts.to(gradient.dtype) / divergence.temperature).unsqueeze(-1))


def bucket_divergence_and_gradient(
    divergence: Divergence,
    ids: Tensor,
    log_p: Tensor,
    student: Tensor,
    labels: Tensor,
    vocabulary: VocabularyShard = FULL_VOCABULARY,
) -> tuple[Tensor, Tensor]:
    """Computes divergence and gradient for a teacher with only its k likeliest ids and the mass of the rest known.

    Both distributions then have k + 1 outcomes: the ids, and "any other". By the data processing inequality the result
    is a lower bound of the divergence over the vocabulary; for k = V they are equal.

    Args:
        divergence: the divergence and its temperature.
        ids: int64 [N.., k], different ones per position.
        log_p: [N.., k + 1], the teacher's log-probabilities at this temperature; the last one is the rest's (-inf: no
            rest).
        student: logits [N.., V'].
        labels: int64 [N..].
        vocabulary: the ids of the V' columns.
    """
    counts = labels != IGNORE
    column = ids - vocabulary.first
    here = (column >= 0) & (column < student.shape[-1])
    column = column.masked_fill(~here, 0)
    scaled, log_z = _scaled((student,), divergence.temperature, vocabulary)
    q = (scaled[0] - log_z[0].unsqueeze(-1)).exp_()
    log_q = ((scaled[0].gather(-1, column) - log_z[0].unsqueeze(-1)) * here).to(q.dtype)
    del scaled
    _clear(q, column, here)
    # summed over the other ids, since 1 - the sum of the k would lose the digits of a small rest
    both = _sum(torch.cat([log_q, q.sum(-1, keepdim=True)], dim=-1), vocabulary)
    log_q, rest = both[..., :-1], both[..., -1:]
    known, log_r = log_p.to(q.dtype), _log_of_rest(log_p[..., -1:].to(q.dtype), rest)
    each, g = divergence.terms(torch.cat([known[..., :-1], log_r[0]], -1), torch.cat([log_q, log_r[1]], -1))
    total, slope = each.sum(-1), g.sum(-1, keepdim=True)
    gradient = q.mul_(torch.where(rest > 0, g[..., -1:] / rest.clamp(min=torch.finfo(q.dtype).tiny), 0.0) - slope)
    gradient.scatter_add_(-1, column, (g[..., :-1] - log_q.exp() * slope) * here)
    return (total * counts).sum(), gradient.mul_((counts.to(gradient.dtype) / divergence.temperature).unsqueeze(-1))


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Computes log softmax(logits / t) over the last dim, unsharded, in fp32 (fp64 for fp64 logits)."""
    return _log_probabilities((logits,), temperature, FULL_VOCABULARY)[0]


SMALLEST_REST = -20.0
"""Lower bound on the log-probability of the rest of a distribution: e^-20 is below fp16's smallest number."""


def _log_of_rest(log_p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns finite log-probabilities of the rest; equal if there is no rest (k = V), which then adds nothing."""
    log_q = q.clamp(min=torch.finfo(q.dtype).tiny).log()
    empty = torch.isneginf(log_p)
    return torch.where(empty, log_q, log_p), log_q


def _clear(q: Tensor, column: Tensor, here: Tensor) -> None:
    """Sets this rank's columns of ids to 0, in place."""
    # another rank's id points at column 0, which must stay unchanged unless it is an id itself
    hit = ((column == 0) & here).any(-1, keepdim=True)
    first = torch.where(hit, 0.0, q[..., :1])
    q.scatter_(-1, column, 0.0)
    q[..., :1] = first


def _log_probabilities(
    logits: tuple[Tensor, ...], temperature: float, vocabulary: VocabularyShard
) -> tuple[Tensor, ...]:
    scaled, log_z = _scaled(logits, temperature, vocabulary)
    return tuple(each.sub_(z.unsqueeze(-1)) for each, z in zip(scaled, log_z, strict=True))


def _scaled(logits: tuple[Tensor, ...], temperature: float, vocabulary: VocabularyShard) -> tuple[list[Tensor], Tensor]:
    """Returns logits / t in fp32, and the log of their partition functions, [len(logits), N..]."""
    scaled = [each.to(torch.promote_types(each.dtype, torch.float32)) / temperature for each in logits]
    if vocabulary.group is None:
        return scaled, torch.stack([each.logsumexp(-1) for each in scaled])
    highest = torch.stack([each.amax(-1) for each in scaled])
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=vocabulary.group)
    z = torch.stack([(each - high.unsqueeze(-1)).exp_().sum(-1) for each, high in zip(scaled, highest, strict=True)])
    return scaled, _sum(z, vocabulary).log_().add_(highest)


def _sum(values: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Sums over the ranks that share the vocabulary."""
    if vocabulary.group is not None:
        dist.all_reduce(values, group=vocabulary.group)
    return values
