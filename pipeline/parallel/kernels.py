"""Flash attention kernels that also return the log-sum-exp, with which ring attention merges chunks of the keys.

`F.scaled_dot_product_attention` does not return the log-sum-exp; the operators beneath it do. Where they do not run
(fp32 on a GPU, a head size that is not a multiple of 8), plain matrix products are used, with T x T scores per head.

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
        scale: factor on the scores.
        causal: query t attends to keys 0 to t; T' is T then.
    """
    if query.device.type == "cpu":
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, log_sum
    if _fits_flash(query):
        out, log_sum, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return out, log_sum
    return math_forward(query, key, value, scale=scale, causal=causal)


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
    """Gradients of query, key and value from one chunk of the keys.

    Args:
        grad: of `out`.
        out, log_sum: of attention to all chunks: a probability is exp(score - log_sum), whatever its chunk.
    """
    if query.device.type == "cpu":
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, log_sum, 0.0, causal, scale=scale
        )
        return _three(parts)
    if _fits_flash(query):
        # further outputs of the forward operator: no boundaries of packed sequences, and a random generator state,
        # which is unused without dropout
        packed = (None, None, query.shape[2], key.shape[2])
        seed, offset = (torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
        parts = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, log_sum, *packed, 0.0, causal, seed, offset, scale=scale
        )
        return _three(parts)
    return math_backward(grad, query, key, value, out, log_sum, scale=scale, causal=causal)


def _three(parts: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = parts
    return query, key, value


def _fits_flash(query: Tensor) -> bool:
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0):  # before Ampere
        return False
    return query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def math_forward(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """As `attention_forward`, in fp32 with plain matrix products."""
    scores = _scores(query, key, scale=scale, causal=causal)
    log_sum = scores.logsumexp(-1)
    return ((scores - log_sum.unsqueeze(-1)).exp() @ value.float()).to(query.dtype), log_sum


def math_backward(
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
    """As `attention_backward`, in fp32. Source: Dao et al. 2022, FlashAttention (arXiv:2205.14135), appendix B.2."""
    grad, delta = grad.float(), (grad.float() * out.float()).sum(-1, keepdim=True)
    p = (_scores(query, key, scale=scale, causal=causal) - log_sum.unsqueeze(-1)).exp()
    d_scores = p * (grad @ value.float().transpose(-1, -2) - delta) * scale
    return d_scores @ key.float(), d_scores.transpose(-1, -2) @ query.float(), p.transpose(-1, -2) @ grad


def _scores(query: Tensor, key: Tensor, *, scale: float, causal: bool) -> Tensor:
    """fp32 [B, H, T, T']."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -torch.inf)
