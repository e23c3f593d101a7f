"""Attention for Hugging Face models with document masks (packing), sliding windows and context parallelism.

It is registered with transformers' `AttentionInterface` under `ATTENTION_NAME`: every architecture that uses the
interface can run it. For the causal mask it is torch's scaled dot product attention. Document masks and sliding windows
are those of `models.masks`, with FlexAttention on a GPU. Queries can attend to keys of other ranks (context
parallelism).

Shapes: B samples, H heads, K key/value heads, T positions of this rank, S of the full sequence, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.models.attention_logits import REFERENCE_NAME, LogitWatch, watch_of
from pipeline.models.masks import AttentionMask, make_mask

ATTENTION_NAME = "headrace"
"""Value of `attn_implementation` that selects this attention."""

RecordAttention = Callable[[int, Tensor, Tensor, Tensor], None]
"""Function that takes a layer's index, queries, keys and values; see `AttentionContext.record`."""


def attention_of(run: ResolvedRun) -> str:
    """Returns the attention implementation for transformers: our own for "sdpa", except in the plain reference."""
    given: str = run.config.model.attn_implementation
    if run.plain and run.config.optimizer.params.qk_clip is not None:
        return REFERENCE_NAME
    return ATTENTION_NAME if given == "sdpa" and not run.plain else given


class ContextParallelAttention(Protocol):
    """Attention across ranks that each hold a shard of the sequence (context parallelism)."""

    def make_mask(
        self,
        documents: Tensor | None,
        window: int | None,
        *,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """Makes a mask in the form that `attend` takes; arguments as in `masks.make_mask`."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Any, watch: LogitWatch | None = None
    ) -> Tensor:
        """Computes attention of this rank's queries [B, H, T, d] to the keys of all ranks; see `attend` of this module.

        The watch collects the logits that this rank computes.
        """
        ...


@dataclass(frozen=True)
class AttentionContext:
    """Context of a forward pass; the model's keyword arguments pass it to every layer's attention.

    Attributes:
        length: positions of the full sequence, S.
        documents: [B, S], document index of every position; None for one document.
        masks: window of a layer (None for full attention) -> mask, made once for all layers. Without context
            parallelism, an `AttentionMask`.
        cp_attention: attention across ranks; None without context parallelism.
        record: function called with a layer's index, queries [B, H, T, d], keys and values [B, K, T, d]; or None.
    """

    length: int
    documents: Tensor | None
    masks: Mapping[int | None, Any]
    cp_attention: ContextParallelAttention | None = None
    record: RecordAttention | None = None

    def mask(self, window: int | None, query: Tensor) -> Any:
        """Returns the mask of a layer; makes one for the layer if the model's config does not contain its window."""
        if window in self.masks:
            return self.masks[window]
        make = make_mask if self.cp_attention is None else self.cp_attention.make_mask
        return make(self.documents, window, length=self.length, dtype=query.dtype, device=query.device)


def attention_windows(config: Any) -> set[int | None]:
    """Returns the sliding windows of a model's layers, from its Hugging Face config; None is full attention."""
    return {window_of(config, layer) for layer in range(config.num_hidden_layers)}


def window_of(config: Any, layer: int) -> int | None:
    """Returns the sliding window of a layer in positions, from a Hugging Face config; None for full attention."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return window if layer_types[layer] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def make_context(
    windows: Iterable[int | None],
    *,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    documents: Tensor | None = None,
    cp_attention: ContextParallelAttention | None = None,
    record: RecordAttention | None = None,
) -> AttentionContext:
    """Makes the context of a micro-batch, with the masks of all layers.

    Args:
        windows: sliding windows of the model's layers, in positions; None is full attention.
        length: positions of the full sequence, S.
        dtype: dtype of the queries.
        device: device of the queries.
        documents: [B, S], document index of every position; None for one document.
        cp_attention: attention across ranks; None without context parallelism.
        record: function called with a layer's index, queries, keys and values; or None.
    """
    make = make_mask if cp_attention is None else cp_attention.make_mask
    masks = {window: make(documents, window, length=length, dtype=dtype, device=device) for window in windows}
    return AttentionContext(length, documents, masks, cp_attention, record)


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: AttentionMask) -> Tensor:
    """Computes attention of queries [B, H, T, d] to keys and values [B, K, S, d] -> [B, H, T, d]; in decoding T < S."""
    grouped = query.shape[1] != key.shape[1]
    if mask.blocks is not None:
        run = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention(query, key)
        attended: Tensor = run(query, key, value, block_mask=mask.blocks, scale=scale, enable_gqa=grouped)
        return attended
    additive = mask.additive
    if grouped and (additive is not None or (query.is_cuda and query.dtype == torch.float32)):
        # CUDA's fast kernels support grouped heads neither with a mask nor in fp32; the slow kernel would be chosen
        key, value = (repeat_heads(each, query.shape[1] // key.shape[1]) for each in (key, value))
        grouped = False
    if additive is not None and additive.dtype != query.dtype:
        additive = additive.to(query.dtype)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=additive,
        is_causal=additive is None and mask.causal,
        scale=scale,
        enable_gqa=grouped,
    )


def compiled_flex_attention(query: Tensor, key: Tensor) -> Any:
    """Returns compiled FlexAttention for these shapes, for uncompiled layers: uncompiled it makes all S x S scores.

    Dynamo compiles a function for 8 kinds of arguments, then runs it uncompiled. Ring attention over documents has
    three pairs of lengths, with and without gradients, times the kinds of windows. Each pair therefore has a separate
    function for each of the two modes, which raises if it needs more than 8 graphs.
    """
    return _compiled_flex_attention(query.shape, key.shape, torch.is_grad_enabled())


@cache
def _compiled_flex_attention(*_kind: object) -> Any:
    def run(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return flex_attention(query, key, value, **options)

    run.__code__ = run.__code__.replace()  # Dynamo counts graphs by code object, which all functions made here share
    return torch.compile(run, dynamic=False, fullgraph=True)


def repeat_heads(tensor: Tensor, times: int) -> Tensor:
    """Repeats heads: [B, K, T, d] -> [B, K x times, T, d]; the copies of a head are adjacent."""
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
    """Computes attention with Hugging Face's signature; returns [B, T, H, d]."""
    assert context is not None, f"{type(module).__name__} does not pass its keyword arguments to attention"
    assert not dropout, "dropout is refused before a model is built"
    unsupported = [key for key in _UNSUPPORTED if others.get(key) is not None]
    assert not unsupported, f"{type(module).__name__} passes unsupported arguments: {', '.join(unsupported)}"
    if context.record is not None:
        context.record(module.layer_idx, query, key, value)  # type: ignore[arg-type]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    watch = watch_of(module, context.documents, sliding_window, scale=scale)
    mask = context.mask(sliding_window, query)
    if context.cp_attention is not None:
        attended = context.cp_attention.attend(query, key, value, scale=scale, mask=mask, watch=watch)
    else:
        attended = attend(query, key, value, scale=scale, mask=mask)
        if watch is not None:
            watch.see(query, key, queries=(range(context.length),), keys=(range(context.length),))
    return attended.transpose(1, 2).contiguous(), None


_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of Hugging Face's attention functions that this attention does not support."""

AttentionInterface.register(ATTENTION_NAME, _forward)
