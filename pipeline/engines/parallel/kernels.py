"""Flash attention kernels that also return the log-sum-exp, with which ring attention merges chunks of the keys.

`F.scaled_dot_product_attention` does not return the log-sum-exp, but its underlying operators do. Where these do not
run (fp32 on a GPU, a head size that is not a multiple of 8), plain matrix products are used, with T x T scores per
head.

On a GPU, FlexAttention computes blocks with a document mask or a sliding window; on a CPU an additive mask is used.

Values may be narrower than keys (multi-head latent attention). The flash kernels support one head size, so the narrower
tensors get columns of zeros.

Shapes: queries [B, H, T, d], keys [B, K, T', d], values [B, K, T', e], log-sum-exp fp32 [B, H, T]; H is a multiple of
K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from pipeline.models.attention import attend_by_rule, compiled_flex_attention, repeat_heads
from pipeline.models.attention_scores import ScoreRule
from pipeline.models.masks import AttentionMask

aten: Any = torch.ops.aten


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: AttentionMask, rule: ScoreRule | None = None
) -> tuple[Tensor, Tensor]:
    """Returns output [B, H, T, e] and log-sum-exp of the scores; 0 and minus infinity for a query without keys.

    Args:
        query, key, value: queries, and keys and values of a block.
        scale: factor on the scores.
        mask: keys that each query attends to. With `CAUSAL`, query t attends to keys 0 to t, and T' is T.
        rule: change of the scores, for these keys. Its sinks are not applied: they join when blocks are merged.
    """
    if rule is not None and rule.changes_scores:
        return attend_by_rule(query, key, value, scale=scale, mask=mask, rule=rule, flex=query.is_cuda)
    if mask.blocks is not None:
        return flex_forward(query, key, value, scale=scale, mask=mask)
    size = value.shape[-1]
    query, key, value = _of_one_width(query, *_repeated(query, key, value))
    if query.device.type == "cpu":
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask.causal_only, attn_mask=mask.additive, scale=scale
        )
        if mask.additive is not None:  # for no key, the kernel's log-sum-exp is 0
            log_sum = log_sum.masked_fill((mask.additive == -torch.inf).all(-1), -torch.inf)
        return out[..., :size], log_sum
    assert mask.additive is None, "masks of a GPU are blocks"
    if _fits_flash(query):
        flash = aten._scaled_dot_product_flash_attention
        out, log_sum, *_ = flash(query, key, value, 0.0, mask.causal_only, scale=scale)
    else:
        out, log_sum = math_forward(query, key, value, scale=scale, causal=mask.causal_only)
    return out[..., :size], log_sum


def attention_backward(  # noqa: PLR0913  the arguments of the forward pass, and its results
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    scale: float,
    mask: AttentionMask,
    rule: ScoreRule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients of query, key and value from one block of keys; in fp32 for keys and values.

    Args:
        grad: gradient of `out`.
        query, key, value, scale, mask, rule: arguments of `attention_forward`.
        out, log_sum: results of attention to all blocks and sinks; in a block, a probability is exp(score - log_sum).
    """
    if rule is not None and rule.changes_scores:
        by_rule = partial(attention_forward, scale=scale, mask=mask, rule=rule)
        return merged_backward(grad, query, key, value, out, log_sum, forward=by_rule)
    if mask.blocks is not None:
        flex = partial(flex_forward, scale=scale, mask=mask)
        return merged_backward(grad, query, key, value, out, log_sum, forward=flex)
    heads, causal, (size, wide) = key.shape[1], mask.causal_only, (key.shape[-1], value.shape[-1])
    query, key, value, grad, out = _of_one_width(query, *_repeated(query, key, value), grad, out)
    # CUDA's kernel reads the log-sum-exp as a contiguous [B, H, T] and ignores its strides
    log_sum = log_sum.contiguous()
    if query.device.type == "cpu":
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, log_sum, 0.0, causal, attn_mask=mask.additive, scale=scale
        )
    elif _fits_flash(query):
        # further outputs of the forward operator: no boundaries of packed sequences, and a random generator's state,
        # unused without dropout
        packed = (None, None, query.shape[2], key.shape[2])
        seed, offset = (torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
        parts = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, log_sum, *packed, 0.0, causal, seed, offset, scale=scale
        )
    else:
        parts = math_backward(grad, query, key, value, out, log_sum, scale=scale, causal=causal)
    d_key, d_value = (_sum_repeated_heads(each, heads) for each in parts[1:3])
    return parts[0][..., :size], d_key[..., :size], d_value[..., :wide]


def flex_forward(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: AttentionMask
) -> tuple[Tensor, Tensor]:
    """Computes `attention_forward` by FlexAttention. Differentiable on a GPU, in both outputs."""
    run, grouped = compiled_flex_attention(query, key), query.shape[1] != key.shape[1]
    lse = AuxRequest(lse=True)
    out, aux = run(query, key, value, block_mask=mask.blocks, scale=scale, enable_gqa=grouped, return_aux=lse)
    return out, aux.lse


def merged_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    forward: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `attention_backward` by a kernel whose backward pass does not accept the log-sum-exp of all blocks.

    FlexAttention's backward pass needs its own output and log-sum-exp, o_i and l_i. So these are computed again, and
    differentiated with their gradients from merging. With w_i = exp(l_i - log_sum) and out = sum_i w_i o_i, the
    gradient of o_i is w_i grad, and that of l_i is w_i grad . (o_i - out).

    Args:
        grad, query, key, value, out, log_sum: arguments of `attention_backward`.
        forward: differentiable function from query, key and value of a block to o_i and l_i.
    """
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        block_out, block_log_sum = forward(*leaves)
    weight = (block_log_sum.detach() - log_sum).exp()
    d_log_sum = weight * (grad.float() * (block_out.detach().float() - out.float())).sum(-1)
    d_out = (weight.unsqueeze(-1) * grad.float()).to(block_out.dtype)
    d_query, d_key, d_value = torch.autograd.grad((block_out, block_log_sum), leaves, (d_out, d_log_sum))
    return d_query, d_key.float(), d_value.float()


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """Pads tensors [..., d] or [..., e] with zeros to the widest; this changes no score and no other output column."""
    width = max(each.shape[-1] for each in tensors)
    return [F.pad(each, (0, width - each.shape[-1])) if each.shape[-1] < width else each for each in tensors]


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    times = query.shape[1] // key.shape[1]
    return (key, value) if times == 1 else (repeat_heads(key, times), repeat_heads(value, times))


def _sum_repeated_heads(gradient: Tensor, heads: int) -> Tensor:
    """Sums over the copies of a head: [B, H, T', d] -> [B, K, T', d], fp32; `heads` is K."""
    batch, all_heads, length, size = gradient.shape
    return gradient.float().reshape(batch, heads, all_heads // heads, length, size).sum(2)


def _fits_flash(query: Tensor) -> bool:
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0):  # before Ampere
        return False
    return query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def math_forward(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes `attention_forward` in fp32 with plain matrix products."""
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
    """Computes `attention_backward` in fp32. Source: Dao et al. 2022, FlashAttention (arXiv:2205.14135), B.2."""
    grad, delta = grad.float(), (grad.float() * out.float()).sum(-1, keepdim=True)
    p = (_scores(query, key, scale=scale, causal=causal) - log_sum.unsqueeze(-1)).exp()
    d_scores = p * (grad @ value.float().transpose(-1, -2) - delta) * scale
    return d_scores @ key.float(), d_scores.transpose(-1, -2) @ query.float(), p.transpose(-1, -2) @ grad


def _scores(query: Tensor, key: Tensor, *, scale: float, causal: bool) -> Tensor:
    """Scales and masks the scores, fp32 [B, H, T, T']."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -torch.inf)
