"""Scaled dot product attention by the kernel that torch would choose on an H200.

On fake devices torch decomposes attention to matrix products, because a CPU build finds no fused kernel. The choice is
made here as CUDA makes it, and the kernel's own operator is called: torch knows its shapes without having it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten: Any = torch.ops.aten


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replaces `F.scaled_dot_product_attention`: [B, H, T, d], [B, K, T', d] twice -> [B, H, T, d].

    Values may have another head size than queries and keys (multi-head latent attention), which flash attention lacks.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.shape[-1] <= 256 and query.shape[-1] == value.shape[-1]:
        flash = aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out
    assert not enable_gqa or query.shape[1] == key.shape[1], "no fused kernel: masks and fp32 need repeated heads"
    bias = None
    if attn_mask is not None:
        bias = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    attended: Tensor = efficient(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
    return attended


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Replaces attention by `attend` within the block."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
