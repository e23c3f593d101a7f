"""Attention behind Hugging Face's seam for it, with what training needs and the plain ones do not have.

Registered with transformers under `NAME`: every architecture that takes its attention from there can run it. It is
torch's scaled dot product attention, causal, with an optional sliding window; documents packed into one sequence can be
masked from one another, and queries can meet the keys of other ranks (context parallelism).

With a window or documents the mask is a whole tensor of S x S numbers per sample (128 MiB at S = 8192 in bf16), once
per forward pass; without, there is none, and attention needs memory in proportion to S.

Shapes: B samples, H heads, K key/value heads, T positions of this rank, S of the whole sequence, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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
    _made: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def causal(self) -> bool:
        """Nothing is masked but what follows."""
        return self.documents is None and self.window is None

    def added(self, query: Tensor) -> Tensor | None:
        """[B or 1, 1, S, S] of the query's dtype: 0 where a query (row) sees a key (column), else minus infinity.

        None when `causal`. It is made once, for all layers: each would keep its own for the backward pass, and
        S x S numbers times the layers is more than the model. Numbers and not booleans, which the kernels of scaled
        dot product attention would turn into a tensor of numbers in every layer.
        """
        if self.causal:
            return None
        if query.dtype not in self._made:
            allowed = self._allowed(query.shape[2], query.device)
            zeros = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
            self._made[query.dtype] = zeros.masked_fill_(~allowed, -math.inf)
        return self._made[query.dtype]

    def _allowed(self, length: int, device: torch.device) -> Tensor:
        at = torch.arange(length, device=device)
        distance = at[:, None] - at[None, :]
        allowed = distance >= 0
        if self.window is not None:
            allowed = allowed & (distance < self.window)
        if self.documents is None:
            return allowed[None, None]
        return allowed & (self.documents[:, None, :, None] == self.documents[:, None, None, :])


@dataclass(frozen=True)
class AttentionContext:
    """What travels through the model's keyword arguments to attention, the same object to all layers.

    Attributes:
        length: positions of the whole sequence, S.
        documents: see `Mask`.
        exchange: how queries meet the keys of other ranks; None when all positions are here.
    """

    length: int
    documents: Tensor | None = None
    exchange: Exchange | None = None
    _masks: dict[int | None, Mask] = field(default_factory=dict, repr=False, compare=False)

    def mask(self, window: int | None) -> Mask:
        """The mask of all layers with a window; one that is not smaller than the sequence is none."""
        bites = window if window is not None and window < self.length else None
        return self._masks.setdefault(bites, Mask(self.documents, bites))


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Mask) -> Tensor:
    """Causal attention of a whole sequence: [B, H, S, d], [B, K, S, d] twice -> [B, H, S, d]."""
    grouped = query.shape[1] != key.shape[1]
    added = mask.added(query)
    if grouped and (added is not None or (query.is_cuda and query.dtype == torch.float32)):
        # with a mask, and in fp32, CUDA's fast kernels take no grouped heads and the slow one would be chosen
        key, value = (repeat_heads(each, query.shape[1] // key.shape[1]) for each in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=added, is_causal=added is None, scale=scale, enable_gqa=grouped
    )


def repeat_heads(tensor: Tensor, times: int) -> Tensor:
    """[B, K, T, d] -> [B, K times, T, d], every head beside its copies."""
    batch, heads, length, size = tensor.shape
    return tensor[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


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
    assert not dropout, "dropout is refused before a model is built"
    unknown = [key for key in _NOT_OFFERED if others.get(key) is not None]
    assert not unknown, f"{type(module).__name__} asks attention for {', '.join(unknown)}"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    run = attend if context.exchange is None else context.exchange.attend
    attended = run(query, key, value, scale=scale, mask=context.mask(sliding_window))
    return attended.transpose(1, 2).contiguous(), None


_NOT_OFFERED = ("softcap", "s_aux", "position_bias", "cache")
"""What Hugging Face's attention functions may be asked for, and this one does not do."""

AttentionInterface.register(NAME, _forward)
