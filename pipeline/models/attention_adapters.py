"""Headrace's own attention in architectures whose code does not call transformers' attention functions with a context.

Some attention modules compute their scores themselves (GPT-J, Bloom), some do not pass on the model's keyword arguments
(StableLM). Such a model is built with eager attention and adapted: a hook before every decoder layer replaces its
attention mask, which every module gets, by the `AttentionContext`, and a subclass of the attention module replaces the
product of queries, keys and values. Parameters and their names stay. Biases of keys (ALiBi) are made by transformers'
own functions, with its rounding, once per forward pass; they count positions from the beginning of a document.

An indexer selects the keys of every query (DeepSeek-V3.2, arXiv:2512.02556). Its code makes scores of all pairs, so the
mask of the selected keys is a tensor of S x S numbers per sample, on a GPU, too.

Shapes: B samples, H heads, K key heads, T positions of this rank, D features, d head size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.models.attention import ATTENTION_NAME, SCALES_QUERIES, AttentionContext, attend_in_context, span_of
from pipeline.models.attention_scores import bias_of_keys, score_rule
from pipeline.models.decoder_layers import base_of
from pipeline.models.masks import allowed_pairs

TENSOR_PART = "tensor_part"
"""Attribute of a module of which tensor parallelism computes some heads: (tp rank, number of tp ranks)."""


@dataclass
class _Current:
    """The context of the forward pass that is running; layers keep it as an argument for their recomputation.

    Attributes:
        context: the context.
        allowed: bool [B or 1, 1, queries, S], the keys among which an indexer selects; None without an indexer.
    """

    context: AttentionContext | None = None
    allowed: Tensor | None = None


@dataclass(frozen=True)
class _Adapter:
    """How an architecture is adapted.

    Attributes:
        module: name of the attention module's class; None if it calls transformers' attention functions.
        methods: names of the class's methods -> their replacements, and further attributes.
        layers: class names of decoder layers that are not transformers' `GradientCheckpointingLayer`.
        bias: function that makes the bias [H, S] of keys from a config and a row of S ones, or None if this config has
            none; None for an architecture without.
        queries: function that makes the scale of queries from a config and their positions [B or 1, T] in documents, or
            None if this config has none; None for an architecture without.
        indexer: name of the class of modules that select keys for every query (DeepSeek-V3.2). They get a mask that is
            a tensor, and attention the selected indices.
        needs_mask: whether the code of the model, which makes no mask then, computes with the mask itself.
    """

    module: str | None = None
    methods: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    bias: Callable[[Any, Tensor], Tensor | None] | None = None
    queries: Callable[[Any, Tensor], Tensor | None] | None = None
    indexer: str | None = None
    needs_mask: bool = False


def is_adapted(config: PretrainedConfig) -> bool:
    """Whether a model of this architecture has to be adapted to run our attention."""
    return config.model_type in _ADAPTERS


def unmeasured_logits(config: PretrainedConfig) -> str | None:
    """Explains why the logits of an adapted architecture cannot be measured for QK-Clip; None if they can."""
    adapter = _ADAPTERS.get(config.model_type, _Adapter())
    if adapter.methods.keys() & {"forward", "_attn"}:
        return "computes its scores in its own code, so that the reference of a proof cannot measure its logits"
    return "selects the keys of every query by an indexer" if adapter.indexer else None


def why_eager(model: nn.Module) -> str:
    """Names a model's attention module and the property that our attention does not have; empty if none is found.

    Args:
        model: a model with which our attention fails, as transformers builds it.
    """
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        code = inspect.getsource(kind) if "Attention" in kind.__name__ else ""
        if "position_bias=position_bias" in code:
            why = "adds a bias that it computes from its queries' hidden states"
        elif "attention_mask=attn_mask" in code:
            why = "makes a mask of its own from the values"
        elif "self.compressor(" in code or "self.indexer(" in code:
            why = "attends to keys that it compresses or selects itself"
        elif "softmax" in code and "attention_interface(" not in code:
            why = "computes its scores in its own code"
        else:
            continue
        return f": {kind.__name__} {why}"
    return ""


def adapt(model: nn.Module) -> None:
    """Adapts a model, which was built with eager attention, in place.

    Args:
        model: a Hugging Face causal language model on any device, of an architecture for which `is_adapted` is true.
    """
    config: Any = model.config
    adapter, current = _ADAPTERS[config.model_type], _Current()
    config._attn_implementation = ATTENTION_NAME
    for each in (model, base_of(model)):
        each.register_forward_pre_hook(partial(_keep_context, current, adapter), with_kwargs=True)
    for module in list(model.modules()):
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in adapter.layers:
            module.register_forward_pre_hook(partial(_pass_context, current), with_kwargs=True)
    found = [module for module in model.modules() if type(module).__name__ == adapter.module]
    for index, module in enumerate(found):
        module.__class__ = _subclass(type(module), config.model_type)  # type: ignore[arg-type]
        if not hasattr(module, "layer_idx"):
            module.layer_idx = index  # type: ignore[assignment]
    for module in model.modules():
        if type(module).__name__ == adapter.indexer:
            module.__class__ = _subclass(type(module), config.model_type)  # type: ignore[arg-type]
            module.current = current  # type: ignore[assignment]


@cache
def _subclass(module_class: type[nn.Module], kind: str) -> type[nn.Module]:
    adapter = _ADAPTERS[kind]
    methods = {"forward": _selected} if module_class.__name__ == adapter.indexer else adapter.methods
    return type(module_class.__name__, (module_class,), dict(methods))


def _keep_context(current: _Current, adapter: _Adapter, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Takes the context from the arguments of a model, whose code may not accept it."""
    context: AttentionContext | None = kwargs.get("context")
    if context is not None:
        inputs = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        ones = torch.ones(1, context.length, dtype=torch.int64, device=inputs.device)
        table = None if adapter.bias is None else adapter.bias(model.config, ones)
        bias = None if table is None else bias_of_keys(table, context.documents)
        scale = None if adapter.queries is None else adapter.queries(model.config, kwargs["position_ids"])
        current.context = replace(context, bias=bias, query_scale=scale)
        if adapter.needs_mask:
            kwargs = {**kwargs, "attention_mask": ones[None, None]}  # of 4 dims: passed on as it is
    if adapter.indexer is not None:
        if context is not None:
            queries = context.length if context.cp_attention is not None else kwargs["position_ids"].shape[1]
            at = torch.arange(context.length, device=inputs.device)
            current.allowed = allowed_pairs(context.documents, None, at[context.length - queries :], at)
        return args, kwargs
    return args, {key: value for key, value in kwargs.items() if key != "context"}


def _pass_context(current: _Current, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces a layer's attention mask by the context, or by the keys among which its indexer selects."""
    mask = current.context if current.allowed is None else current.allowed
    if len(args) > 1:  # hidden states, mask
        return (args[0], mask, *args[2:]), kwargs
    return args, {**kwargs, "attention_mask": mask}


def _product(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: AttentionContext,
    *,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes attention in the dtype of the values: [B, H, T, d]."""
    query, key, config = query.to(value.dtype), key.to(value.dtype), getattr(module, "config", None)
    span = None if config is None else span_of(config, module.layer_idx)  # type: ignore[arg-type]
    part: tuple[int, int] | None = getattr(module, TENSOR_PART, None)
    if bias is not None and part is not None:
        bias = bias.chunk(part[1], 1)[part[0]]
    assert bias is None or bias.shape[1] == query.shape[1], (bias.shape, query.shape)
    rule = score_rule(bias=bias)
    return attend_in_context(module, query, key, value, context, scale=scale, span=span, rule=rule)


def _selected(
    self: Any,
    hidden_states: Tensor,
    query_latents: Tensor,
    embeddings: tuple[Tensor, Tensor],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Replaces the forward pass of an indexer: with Ulysses it selects for and from all positions of the sequence."""
    inputs, cp_attention = (hidden_states, query_latents, *embeddings), self.current.context.cp_attention
    if cp_attention is not None:
        if not hasattr(cp_attention, "gathered"):
            why = f"{type(self).__name__} selects keys of the whole sequence, which no rank of a ring has"
            raise NotImplementedError(why)
        inputs = tuple(cp_attention.gathered(each) for each in inputs)
    original: Any = type(self).__mro__[1]
    indices: Tensor = original.forward(self, *inputs[:2], inputs[2:], *args, **kwargs)
    return indices


def _merged(attended: Tensor) -> Tensor:
    """Merges heads: [B, H, T, d] -> [B, T, D]."""
    return attended.transpose(1, 2).flatten(2)


def _scaled_by(attribute: str | None) -> Callable[..., Any]:
    """Returns a method `_attn` for modules that divide scores by an attribute; None for no division."""

    def attn(self: Any, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> tuple[Tensor, None]:
        scale = 1.0 if attribute is None else 1 / getattr(self, attribute)
        return _product(self, query, key, value, context, scale=scale), None

    return attn


def _openai(
    self: Any, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, _output_attentions: bool
) -> list[Tensor]:
    """Replaces `_attn` of GPT, whose keys are [B, H, d, T]."""
    scale = value.shape[-1] ** -0.5 if self.scale else 1.0
    return [_product(self, query, key.mT, value, context, scale=scale)]


def _xglm(
    self: Any, hidden_states: Tensor, *, attention_mask: AttentionContext, past_key_values: Any = None, **_others: Any
) -> tuple[Tensor, None]:
    """Replaces the forward pass of XGLM's attention."""
    projections = (each(hidden_states) for each in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projections)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    attended = _product(self, query, key, value, attention_mask, scale=self.scaling)
    return self.out_proj(_merged(attended)), None


def _bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    *,
    attention_mask: AttentionContext,
    layer_past: Any = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Replaces the forward pass of Bloom's attention, which rounds its bias to the dtype of its activations."""
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    assert attention_mask.bias is not None
    bias = attention_mask.bias.to(value.dtype)
    attended = _product(self, query, key, value, attention_mask, scale=self.inv_norm_factor, bias=bias)
    return self.dense(_merged(attended)) + residual, None


def _bloom_bias(config: Any, ones: Tensor) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: PLC0415

    table: Tensor = build_alibi_tensor(ones, config.n_head, torch.float32)[:, 0]
    return table


def _mpt(
    self: Any, hidden_states: Tensor, *, attention_mask: AttentionContext, past_key_values: Any = None, **_others: Any
) -> tuple[Tensor, None]:
    """Replaces the forward pass of MPT's attention."""
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (each.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for each in mixed.chunk(3, dim=-1))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    bias = attention_mask.bias
    attended = _product(self, query, key, value, attention_mask, scale=self.softmax_scale, bias=bias)
    return self.out_proj(_merged(attended)), None


def _mpt_bias(config: Any, ones: Tensor) -> Tensor:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor  # noqa: PLC0415

    table: Tensor = build_mpt_alibi_tensor(config.n_heads, ones.shape[1], device=ones.device)[:, 0]
    return table


def _falcon(
    self: Any,
    hidden_states: Tensor,
    *,
    attention_mask: AttentionContext,
    position_embeddings: tuple[Tensor, Tensor],
    layer_past: Any = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Replaces the forward pass of Falcon's attention, with a bias or with rotary embeddings."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb  # noqa: PLC0415

    query, key, value = (each.transpose(1, 2) for each in self._split_heads(self.query_key_value(hidden_states)))
    if attention_mask.bias is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    scale, bias = self.inv_norm_factor, attention_mask.bias
    attended = _product(self, query, key, value, attention_mask, scale=scale, bias=bias)
    return self.dense(_merged(attended)), None


def _falcon_bias(config: Any, ones: Tensor) -> Tensor | None:
    """Makes Falcon's bias, which it adds before it scales, and rounds to bf16 in every dtype."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor  # noqa: PLC0415

    if not config.alibi:
        return None
    heads = config.num_attention_heads
    table: Tensor = build_alibi_tensor(ones, heads, torch.float32)[:, 0]
    return table / math.sqrt(config.hidden_size // heads)


def _llama4_scale(config: Any, positions: Tensor) -> Tensor | None:
    """Makes the temperature of Llama 4, in place of its code's, which counts the positions of a rank's tensor.

    Source: Nakanishi 2025 (arXiv:2501.19399).
    """
    if not config.attn_temperature_tuning:
        return None
    scale: Tensor = torch.log1p(((positions.float() + 1) / config.floor_scale).floor()) * config.attn_scale + 1
    return scale[:, None, :, None]


_LLAMA4 = {
    SCALES_QUERIES: property(lambda self: not self.use_rope),
    "attn_temperature_tuning": property(lambda _: False),  # before the object's own attribute
}
_ADAPTERS = {
    "axk2": _Adapter(indexer="AXK2Indexer"),
    "bloom": _Adapter("BloomAttention", {"forward": _bloom}, bias=_bloom_bias),
    "codegen": _Adapter("CodeGenAttention", {"_attn": _scaled_by("scale_attn")}),
    "deepseek_v32": _Adapter(indexer="DeepseekV32Indexer"),
    "dots3_note_text": _Adapter(indexer="Dots3NoteTextIndexer"),
    "falcon": _Adapter("FalconAttention", {"forward": _falcon}, bias=_falcon_bias),
    "glm_moe_dsa": _Adapter(indexer="GlmMoeDsaIndexer"),
    "gpt_neo": _Adapter("GPTNeoSelfAttention", {"_attn": _scaled_by(None)}),
    "gpt_neox_japanese": _Adapter(
        "GPTNeoXJapaneseAttention", {"_attn": _scaled_by("norm_factor")}, ("GPTNeoXJapaneseLayer",)
    ),
    "gptj": _Adapter("GPTJAttention", {"_attn": _scaled_by("scale_attn")}),
    "hy_v4": _Adapter(indexer="HYV4Indexer"),
    "llama4_text": _Adapter("Llama4TextAttention", _LLAMA4, queries=_llama4_scale),
    "mpt": _Adapter("MptAttention", {"forward": _mpt}, bias=_mpt_bias, needs_mask=True),
    "nemotron": _Adapter(),
    "openai-gpt": _Adapter("Attention", {"_attn": _openai}, ("Block",)),
    "stablelm": _Adapter(),
    "xglm": _Adapter("XGLMAttention", {"forward": _xglm}),
}
"""Model type -> its adapter."""
