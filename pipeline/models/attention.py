"""Attention for Hugging Face models with document masks (packing), sliding windows and context parallelism.

Registered with transformers' `AttentionInterface` under `ATTENTION_NAME`: every architecture that uses that interface
can run it. It is torch's scaled dot product attention, causal, with an optional sliding window; documents packed into
one sequence can be masked from one another, and queries can attend to the keys of other ranks (context parallelism).

With a window or a document mask, the mask is a tensor of S x S numbers per sample (128 MiB at S = 8192 in bf16), built
once per forward pass; without, there is none, and attention memory is proportional to S.

Shapes: B samples, H heads, K key/value heads, T positions of this rank, S of the full sequence, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "headrace"
"""The value of `attn_implementation` that selects this attention."""


class ContextParallelAttention(Protocol):
    """Attention across ranks that each hold a shard of the sequence (context parallelism)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: AttentionMask) -> Tensor:
        """As `attend` of this module, for queries [B, H, T, d] of this rank over the keys of all ranks."""
        ...


@dataclass(frozen=True)
class AttentionMask:
    """Attention mask in addition to the causal mask: documents and a sliding window.

    Attributes:
        documents: int32 [B, S], document index of every position of the full sequence; None for one document.
        window: positions that a query attends to, itself included; None for all.
    """

    documents: Tensor | None = None
    window: int | None = None
    _by_dtype: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def causal_only(self) -> bool:
        """Whether the mask is the causal mask alone."""
        return self.documents is None and self.window is None

    def additive(self, query: Tensor) -> Tensor | None:
        """[B or 1, 1, S, S] of the query's dtype: 0 where a query (row) attends to a key (column), else minus infinity.

        None when `causal_only`. It is built once for all layers: each would keep its own for the backward pass, and
        S x S numbers times the number of layers is more than the model. An additive mask, not a boolean one, which the
        kernels of scaled dot product attention would convert to an additive one in every layer.
        """
        if self.causal_only:
            return None
        if query.dtype not in self._by_dtype:
            allowed = self._allowed(query.shape[2], query.device)
            zeros = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
            self._by_dtype[query.dtype] = zeros.masked_fill_(~allowed, -math.inf)
        return self._by_dtype[query.dtype]

    def _allowed(self, length: int, device: torch.device) -> Tensor:
        positions = torch.arange(length, device=device)
        distance = positions[:, None] - positions[None, :]
        allowed = distance >= 0
        if self.window is not None:
            allowed = allowed & (distance < self.window)
        if self.documents is None:
            return allowed[None, None]
        return allowed & (self.documents[:, None, :, None] == self.documents[:, None, None, :])


@dataclass(frozen=True)
class AttentionContext:
    """Passed to the attention of every layer, the same object, through the model's keyword arguments.

    Attributes:
        length: positions of the full sequence, S.
        documents: see `AttentionMask`.
        cp_attention: attention across ranks; None without context parallelism.
    """

    length: int
    documents: Tensor | None = None
    cp_attention: ContextParallelAttention | None = None
    _masks: dict[int | None, AttentionMask] = field(default_factory=dict, repr=False, compare=False)

    def mask(self, window: int | None) -> AttentionMask:
        """The mask for layers with this window; a window not smaller than the sequence has no effect."""
        effective = window if window is not None and window < self.length else None
        return self._masks.setdefault(effective, AttentionMask(self.documents, effective))


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: AttentionMask) -> Tensor:
    """Causal attention of a full sequence: [B, H, S, d], [B, K, S, d] twice -> [B, H, S, d]."""
    grouped = query.shape[1] != key.shape[1]
    additive = mask.additive(query)
    if grouped and (additive is not None or (query.is_cuda and query.dtype == torch.float32)):
        # with a mask, and in fp32, CUDA's fast kernels do not support grouped heads; the slow one would be chosen
        key, value = (repeat_heads(each, query.shape[1] // key.shape[1]) for each in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=additive, is_causal=additive is None, scale=scale, enable_gqa=grouped
    )


def repeat_heads(tensor: Tensor, times: int) -> Tensor:
    """[B, K, T, d] -> [B, K times, T, d]; the copies of a head are adjacent."""
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
    """Attention with Hugging Face's signature; returns [B, T, H, d]."""
    assert context is not None, f"{type(module).__name__} does not pass its keyword arguments to attention"
    assert not dropout, "dropout is refused before a model is built"
    unsupported = [key for key in _UNSUPPORTED if others.get(key) is not None]
    assert not unsupported, f"{type(module).__name__} passes unsupported arguments: {', '.join(unsupported)}"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    run = attend if context.cp_attention is None else context.cp_attention.attend
    attended = run(query, key, value, scale=scale, mask=context.mask(sliding_window))
    return attended.transpose(1, 2).contiguous(), None


_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of Hugging Face's attention functions that this one does not support."""

AttentionInterface.register(ATTENTION_NAME, _forward)
