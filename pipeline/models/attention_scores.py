"""Rules that change attention's scores: soft caps, a bias of keys (ALiBi), and attention sinks.

A score is the scaled product of a query and a key. A soft cap bounds it; a bias is added to it. A sink is a learned
logit of a head that joins the softmax and has the value 0, so that a head may attend to nothing: with the log-sum-exp l
of a query's scores, the output is multiplied by sigmoid(l - sink). So sinks also join the merge of ring attention.

On a GPU, FlexAttention applies a rule; on a CPU, where it has no backward pass, plain products of all Q x K scores do.

Sources: Gemma 2 (arXiv:2408.00118), section 2; Press et al. 2022, ALiBi (arXiv:2108.12409); GPT-OSS (arXiv:2508.10925),
section 2.2.

Shapes: B samples, H heads, K key heads, T queries, S keys, d head size, e head size of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from pipeline.models.masks import AttentionMask, positions_in_documents

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's `score_mod`: takes a score and its indices of sample, head, query and key; returns the new score."""


@dataclass(frozen=True)
class ScoreRule:
    """The rule of a layer; a rule without any of the three is None instead.

    Attributes:
        softcap: bound c; a score x becomes c tanh(x / c). None for no bound.
        bias: [B or 1, H, positions of the full sequence], added to the capped scores of a key. Without gradient.
        sinks: [H], the logits of the heads' sinks.
    """

    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether scores change; sinks alone change only the sum over them."""
        return self.softcap is not None or self.bias is not None

    def of_heads(self, heads: slice) -> ScoreRule:
        """Returns the rule for some of the heads."""
        bias = None if self.bias is None else self.bias[:, heads]
        return replace(self, bias=bias, sinks=None if self.sinks is None else self.sinks[heads])

    def of_keys(self, positions: Tensor) -> ScoreRule:
        """Returns the rule for the keys at some positions of the sequence."""
        return self if self.bias is None else replace(self, bias=self.bias[..., positions])


def score_rule(
    *, softcap: float | None = None, bias: Tensor | None = None, sinks: Tensor | None = None
) -> ScoreRule | None:
    """Makes a layer's rule; None if nothing changes."""
    if softcap is None and bias is None and sinks is None:
        return None
    return ScoreRule(softcap, bias, sinks)


def bias_of_keys(table: Tensor, documents: Tensor | None) -> Tensor:
    """Makes the bias of a rule, which depends on a key's position in its document.

    Args:
        table: [H, S], the bias of every head at every position.
        documents: [B, S], document index of every position; None for one document.

    Returns:
        [B or 1, H, S].
    """
    if documents is None:
        return table[None]
    return table[:, positions_in_documents(documents)].transpose(0, 1)


def score_function(rule: ScoreRule) -> ScoreFunction | None:
    """Returns the rule as FlexAttention's `score_mod`; None if scores do not change."""
    if rule.bias is None:
        return None if rule.softcap is None else _capped(rule.softcap)
    bias, capped = rule.bias, None if rule.softcap is None else _capped(rule.softcap)
    shared = bias.shape[0] == 1

    def biased(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = score if capped is None else capped(score, sample, head, query, key)
        return score + bias[sample * 0 if shared else sample, head, key]  # FlexAttention takes no constant index

    return biased


@cache  # one function per bound: compiled FlexAttention depends on its identity
def _capped(bound: float) -> ScoreFunction:
    def capped(score: Tensor, _sample: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return capped


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: AttentionMask, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Computes attention with all scores in memory, in fp32 or a wider dtype of the queries. Differentiable.

    Args:
        query, key, value: [B, H, T, d], [B, K, S, d] and [B, K, S, e].
        scale: factor on the products.
        mask: a mask without FlexAttention's blocks.
        rule: the layer's rule; its sinks are not applied.

    Returns:
        Output [B, H, T, e] in the queries' dtype, and log-sum-exp of the scores [B, H, T]; 0 and minus infinity for a
        query without keys.
    """
    assert mask.blocks is None, "blocks are FlexAttention's"
    wide, times = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
    key, value = (each.to(wide).repeat_interleave(times, 1) for each in (key, value))
    scores = query.to(wide) @ key.mT * scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.bias is not None:
        scores = scores + rule.bias[:, :, None]
    if mask.additive is not None:
        scores = scores + mask.additive
    elif mask.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    sums = scores.masked_fill(empty, 0).logsumexp(-1, keepdim=True)
    out = ((scores - sums).exp() @ value).to(query.dtype)
    return out, sums.masked_fill(empty, -torch.inf).squeeze(-1)


def with_sinks(out: Tensor, log_sum: Tensor, rule: ScoreRule) -> Tensor:
    """Lets the sinks of a rule, if it has any, join the softmax over all keys.

    Args:
        out: output [B, H, T, e] over the keys.
        log_sum: log-sum-exp of the scores [B, H, T].
        rule: the layer's rule.
    """
    if rule.sinks is None:
        return out
    share = (log_sum - rule.sinks.to(log_sum.dtype)[:, None]).sigmoid()
    return (out * share.unsqueeze(-1)).to(out.dtype)


def sink_gradient(grad: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Computes the gradient of sinks [H], for attention whose backward pass is written out.

    Args:
        grad, out: gradient of the output and the output with sinks [B, H, T, e].
        log_sum: log-sum-exp of the scores and the sink [B, H, T].
        sinks: the sinks [H].
    """
    weight = (sinks.float()[:, None] - log_sum).exp()  # the sink's part of the softmax, whose value is 0
    return -(weight * (grad.float() * out.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)
