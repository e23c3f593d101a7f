"""Attention for Hugging Face models with document masks (packing), sliding windows and context parallelism.

It is registered with transformers' `AttentionInterface` under `ATTENTION_NAME`: every architecture that uses the
interface can run it. For the causal mask it is torch's scaled dot product attention. Document masks and sliding windows
are those of `models.masks`, soft caps and sinks those of `models.attention_scores`, both with FlexAttention on a GPU.
Queries can attend to keys of other ranks (context parallelism).

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
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from transformers import AttentionInterface

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.models.attention_logits import REFERENCE_NAME, LogitWatch, watch_of
from pipeline.models.attention_scores import ScoreRule, plain_attention, score_function, score_rule, with_sinks
from pipeline.models.hf_config import read_hf_config
from pipeline.models.masks import AttentionMask, Chunks, Span, make_mask, make_selected_mask, split_span, with_blocks

ATTENTION_NAME = "headrace"
"""Value of `attn_implementation` that selects this attention."""

SCALES_QUERIES = "scales_queries"
"""Attribute of the attention modules of models whose contexts have a `query_scale`: whether it is the module's."""

RecordAttention = Callable[[int, Tensor, Tensor, Tensor], None]
"""Function that takes a layer's index, queries, keys and values; see `AttentionContext.record`."""


_WITHOUT_DOCUMENTS = frozenset(
    {
        *("afmoe", "bert", "bert-generation", "biogpt", "bloom", "electra", "ernie", "falcon", "gpt_oss"),
        *("llama4_text", "mpt", "openai-gpt", "opt", "roc_bert"),
    }
)
"""Architectures for which transformers 5.23 makes no mask, or another one (Llama 4), from positions that begin anew."""


def attention_of(run: ResolvedRun) -> str:
    """Returns the attention implementation for transformers: our own for "sdpa", except in the plain reference.

    The reference has ours, too, where documents are masked and transformers does not mask them.
    """
    given: str = run.config.model.attn_implementation
    if run.plain and run.config.optimizer.params.qk_clip is not None:
        return REFERENCE_NAME
    if given != "sdpa" or (run.plain and not (run.config.data.mask_documents and _without_documents(run))):
        return given
    return ATTENTION_NAME


def _without_documents(run: ResolvedRun) -> bool:
    section = run.config.model
    if section.config is not None:
        return section.config["model_type"] in _WITHOUT_DOCUMENTS
    assert section.path is not None
    return read_hf_config(section.path).model_type in _WITHOUT_DOCUMENTS


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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: Any,
        rule: ScoreRule | None = None,
        watch: LogitWatch | None = None,
    ) -> Tensor:
        """Computes attention of this rank's queries [B, H, T, d] to the keys of all ranks; see `attend` of this module.

        The rule covers all heads and positions. The watch collects the logits that this rank computes.
        """
        ...


@dataclass(frozen=True)
class AttentionContext:
    """Context of a forward pass; the model's keyword arguments pass it to every layer's attention.

    Attributes:
        length: positions of the full sequence, S.
        documents: [B, S], document index of every position; None for one document.
        masks: span of a layer -> mask, made once for all layers. Without context parallelism, an `AttentionMask`.
        cp_attention: attention across ranks; None without context parallelism.
        record: function called with a layer's index, queries [B, H, T, d], keys and values [B, K, T, d]; or None.
        bias: [B or 1, H, S], added to the scores of a key by architectures with ALiBi; None for others.
        query_scale: [B or 1, 1, T, 1], factor on the queries of some layers, which depends on their position in a
            document (Llama 4's temperature); None for others.
        flex: whether FlexAttention may run on a GPU; not for lengths that change with every pass, as in decoding.
    """

    length: int
    documents: Tensor | None
    masks: Mapping[Span, Any]
    cp_attention: ContextParallelAttention | None = None
    record: RecordAttention | None = None
    bias: Tensor | None = None
    query_scale: Tensor | None = None
    flex: bool = True

    def mask(self, span: Span, query: Tensor) -> Any:
        """Returns the mask of a layer; makes one for the layer if the model's config does not contain its span."""
        if span in self.masks:
            return self.masks[span]
        make = make_mask if self.cp_attention is None else self.cp_attention.make_mask
        documents, window = split_span(self.documents, span, length=self.length, device=query.device)
        return make(documents, window, length=self.length, dtype=query.dtype, device=query.device)


def attention_windows(config: Any) -> set[Span]:
    """Returns the spans of a model's layers, from its Hugging Face config."""
    return {span_of(config, layer) for layer in range(config.num_hidden_layers)}


def window_of(config: Any, layer: int) -> int | None:
    """Returns the most positions that a query of a layer attends to, from a Hugging Face config; None for all."""
    span = span_of(config, layer)
    return span.size if isinstance(span, Chunks) else span


def span_of(config: Any, layer: int) -> Span:
    """Returns the span of a layer, from a Hugging Face config."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if config.model_type == "gpt_neo":
        return config.window_size if config.attention_layers[layer] == "local" else None
    if layer_types and layer_types[layer] == "chunked_attention":
        return Chunks(config.attention_chunk_size)
    if layer_types:
        return window if layer_types[layer] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def make_context(
    windows: Iterable[Span],
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
        windows: spans of the model's layers.
        length: positions of the full sequence, S.
        dtype: dtype of the queries.
        device: device of the queries.
        documents: [B, S], document index of every position; None for one document.
        cp_attention: attention across ranks; None without context parallelism.
        record: function called with a layer's index, queries, keys and values; or None.
    """
    make = make_mask if cp_attention is None else cp_attention.make_mask
    of_span = {span: split_span(documents, span, length=length, device=device) for span in windows}
    masks = {span: make(*each, length=length, dtype=dtype, device=device) for span, each in of_span.items()}
    return AttentionContext(length, documents, masks, cp_attention, record)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: AttentionMask,
    rule: ScoreRule | None = None,
    flex: bool = False,
) -> Tensor:
    """Computes attention of queries [B, H, T, d] to keys and values [B, K, S, d] -> [B, H, T, d]; in decoding T < S.

    Args:
        query, key, value: [B, H, T, d], [B, K, S, d] and [B, K, S, e].
        scale: factor on the products.
        mask: keys that each query attends to.
        rule: change of the scores; None for none.
        flex: whether FlexAttention computes a rule also without a mask; it always does with a mask of blocks.
    """
    if rule is not None:
        return with_sinks(*attend_by_rule(query, key, value, scale=scale, mask=mask, rule=rule, flex=flex), rule)
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


def attend_by_rule(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: AttentionMask, rule: ScoreRule, flex: bool
) -> tuple[Tensor, Tensor]:
    """Computes attention with a rule's changed scores, without its sinks: output and log-sum-exp of the scores.

    Arguments as in `attend` and `attention_scores.plain_attention`, which runs where FlexAttention does not.
    """
    if flex:
        mask = with_blocks(mask, queries=query.shape[2], keys=key.shape[2], device=query.device)
    if mask.blocks is None:
        return plain_attention(query, key, value, scale=scale, mask=mask, rule=rule)
    run = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention(query, key)
    grouped, scores = query.shape[1] != key.shape[1], score_function(rule)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": grouped, "return_aux": AuxRequest(lse=True)}
    out, aux = run(query, key, value, score_mod=scores, block_mask=mask.blocks, **options)
    return out, aux.lse


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


def attend_in_context(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: AttentionContext,
    *,
    scale: float,
    span: Span | AttentionMask,
    rule: ScoreRule | None = None,
) -> Tensor:
    """Computes a layer's attention [B, H, T, e], across ranks if the context says so.

    Args:
        module: the layer's attention module; it has an attribute `layer_idx`.
        query, key, value: [B, H, T, d], [B, K, T, d] and [B, K, T, e]; in decoding, keys of earlier positions, too.
        context: context of the forward pass.
        scale: factor on the products.
        span: the layer's span, or its own mask of all positions.
        rule: change of the scores; None for none.
    """
    if context.record is not None:
        context.record(module.layer_idx, query, key, value)  # type: ignore[arg-type]
    if isinstance(span, AttentionMask):
        watch, mask = None, span
    else:
        split = split_span(context.documents, span, length=context.length, device=query.device)
        watch, mask = watch_of(module, *split, scale=scale), context.mask(span, query)
    if context.cp_attention is not None:
        return context.cp_attention.attend(query, key, value, scale=scale, mask=mask, rule=rule, watch=watch)
    attended = attend(query, key, value, scale=scale, mask=mask, rule=rule, flex=context.flex and query.is_cuda)
    if watch is not None:
        watch.see(query, key, queries=(range(context.length),), keys=(range(context.length),))
    return attended


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionContext | Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    context: AttentionContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention with Hugging Face's signature; returns [B, T, H, d]."""
    if isinstance(attention_mask, AttentionContext):  # of an adapted model
        context = attention_mask
    assert context is not None, f"{type(module).__name__} does not pass its keyword arguments to attention"
    assert not others.get("dropout"), "dropout is refused before a model is built"
    unsupported = [key for key in _UNSUPPORTED if others.get(key) is not None]
    assert not unsupported, f"{type(module).__name__} passes unsupported arguments: {', '.join(unsupported)}"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    span: Span | AttentionMask = sliding_window if sliding_window is not None else _chunks_of(module)
    if context.query_scale is not None and getattr(module, SCALES_QUERIES):
        query = (query * context.query_scale).to(query.dtype)
    rule = score_rule(softcap=others.get("softcap"), sinks=others.get("s_aux"))
    if others.get("indices") is not None:
        span = make_selected_mask(others["indices"], context.documents, length=context.length, dtype=query.dtype)
    attended = attend_in_context(module, query, key, value, context, scale=scale, span=span, rule=rule)
    return attended.transpose(1, 2).contiguous(), None


def _chunks_of(module: Any) -> Chunks | None:
    """Returns the chunks of an attention module, which transformers passes in the mask alone."""
    if not getattr(getattr(module, "config", None), "attention_chunk_size", None):
        return None
    span = span_of(module.config, module.layer_idx)
    return span if isinstance(span, Chunks) else None


_UNSUPPORTED = ("position_bias", "cache")
"""Arguments of Hugging Face's attention functions that this attention does not support."""

AttentionInterface.register(ATTENTION_NAME, _forward)
