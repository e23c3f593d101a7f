"""Attention behind Hugging Face's seam for it, with what training needs and the plain ones do not have.

Registered with transformers under `NAME`: every architecture that takes its attention from there can run it. It is
torch's scaled dot product attention, causal, with an optional sliding window; documents packed into one sequence can be
masked from one another, and queries can meet the keys of other ranks (context parallelism).

Shapes: B samples, H heads, K key/value heads, T positions of this rank, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "headrace"
"""What `attn_implementation` is set to."""


class Exchange(Protocol):
    """Attention across ranks that each hold a piece of the sequence."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Mask) -> Tensor:
        """As `attend` of this module, for queries [B, H, T, d] of this rank over the keys of all ranks."""
        ...


@dataclass(frozen=True)
class Mask:
    """Who sees whom, besides that nobody sees what follows.

    Attributes:
        documents: int32 [B, S], number of the document of every position of the whole sequence; None for one document.
        window: positions that a query sees, itself included; None for all.
    """

    documents: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True)
class AttentionContext:
    """What travels through the model's keyword arguments to attention.

    Attributes:
        documents: see `Mask`.
        exchange: how queries meet the keys of other ranks; None when all positions are here.
    """

    documents: Tensor | None = None
    exchange: Exchange | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Mask) -> Tensor:
    """Causal attention of a whole sequence: [B, H, T, d], [B, K, T, d] twice -> [B, H, T, d]."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_allowed(query, mask),
        is_causal=mask.documents is None and mask.window is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _allowed(query: Tensor, mask: Mask) -> Tensor | None:
    """Bool [B or 1, 1, T, T], True where a query (row) sees a key (column); None for plain causal attention."""
    if mask.documents is None and mask.window is None:
        return None
    at = torch.arange(query.shape[2], device=query.device)
    distance = at[:, None] - at[None, :]
    allowed = distance >= 0
    if mask.window is not None:
        allowed = allowed & (distance < mask.window)
    if mask.documents is None:
        return allowed[None, None]
    same = mask.documents[:, None, :, None] == mask.documents[:, None, None, :]
    return same & allowed


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    context: AttentionContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's signature; returns [B, T, H, d]."""
    assert context is not None, f"{type(module).__name__} does not hand its keyword arguments to attention"
    assert not dropout, "attention dropout is refused by the rules"
    assert others.get("softcap") is None, "soft-capped attention needs attn_implementation eager"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    length = query.shape[2] if context.exchange is None else None
    window = sliding_window if sliding_window is not None and (length is None or sliding_window < length) else None
    mask = Mask(context.documents, window)
    run = attend if context.exchange is None else context.exchange.attend
    return run(query, key, value, scale=scale, mask=mask).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _forward)
