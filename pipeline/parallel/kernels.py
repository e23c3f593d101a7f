"""Attention to one piece of the keys, with the log-sum-exp that merges pieces: torch's flash kernels, by device.

`F.scaled_dot_product_attention` does not give the log-sum-exp; the operators beneath it do. Where they do not run
(fp32 on a GPU, a head size that is no multiple of 8), the formula itself is computed, which holds T x T numbers per
head.

Shapes: queries [B, H, T, d], keys and values [B, H, T', d], log-sum-exp fp32 [B, H, T].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, d] and log-sum-exp of the scores.

    Args:
        query, key, value: with equally many heads.
        scale: of the scores.
        causal: query t sees keys 0 to t; T' is T then.
    """
    if query.device.type == "cpu":
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, log_sum
    if _fits_flash(query):
        out, log_sum, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return out, log_sum
    return formula_forward(query, key, value, scale=scale, causal=causal)


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from one piece of the keys.

    Args:
        grad: of `out`.
        out, log_sum: of attention to all pieces: a probability is exp(score - log_sum), whichever piece it is of.
    """
    if query.device.type == "cpu":
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, log_sum, 0.0, causal, scale=scale
        )
        return _three(parts)
    if _fits_flash(query):
        # what the forward operator returns beside the output: no borders of packed sequences, and a state of the
        # generator that nothing reads without dropout
        packed = (None, None, query.shape[2], key.shape[2])
        seed, offset = (torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
        parts = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, log_sum, *packed, 0.0, causal, seed, offset, scale=scale
        )
        return _three(parts)
    return formula_backward(grad, query, key, value, out, log_sum, scale=scale, causal=causal)


def _three(parts: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = parts
    return query, key, value


def _fits_flash(query: Tensor) -> bool:
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0):  # before Ampere
        return False
    return query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def formula_forward(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """As `attention_forward`, in fp32 by the formula."""
    scores = _scores(query, key, scale=scale, causal=causal)
    log_sum = scores.logsumexp(-1)
    return ((scores - log_sum.unsqueeze(-1)).exp() @ value.float()).to(query.dtype), log_sum


def formula_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention_backward`, in fp32 by the formula. Source: Dao et al. 2022 (arXiv:2205.14135), appendix B.2."""
    grad, of_out = grad.float(), (grad.float() * out.float()).sum(-1, keepdim=True)
    chances = (_scores(query, key, scale=scale, causal=causal) - log_sum.unsqueeze(-1)).exp()
    of_scores = chances * (grad @ value.float().transpose(-1, -2) - of_out) * scale
    return of_scores @ key.float(), of_scores.transpose(-1, -2) @ query.float(), chances.transpose(-1, -2) @ grad


def _scores(query: Tensor, key: Tensor, *, scale: float, causal: bool) -> Tensor:
    """fp32 [B, H, T, T']."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if not causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf)
