"""Converts torchtitan's Llama to Hugging Face's names and order of rows.

torchtitan rotates neighboring elements of a head; Hugging Face rotates elements that are half a head apart. The rows of
the query and key projections are therefore in different orders, in the weights and their optimizer states alike. Newer
versions fuse the three projections in memory, and so in the optimizer states: for each key head its query heads, the
key, the value. Seen with torchtitan 0.3.0 (names of fused and unfused projections) and in its source since 0.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from foundation.errors import CheckpointError
from pipeline.checkpoint.importing.source import SourceCheckpoint, TargetModel
from pipeline.checkpoint.write.streamed import LazyTensor

_WHOLE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_ROTATED = {"attention.wq.weight": "self_attn.q_proj.weight", "attention.wk.weight": "self_attn.k_proj.weight"}
_FUSED = "attention.wqkv.weight"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_COMPUTED = re.compile(r"(^|\.)(freqs_cis|rope\.cache)$")
"""Names of rotary position tables, which are computed rather than trained."""


def is_of(source: SourceCheckpoint) -> bool:
    """Whether a checkpoint has torchtitan's names."""
    return "tok_embeddings.weight" in source.weights


def in_hugging_face_names(source: SourceCheckpoint, wanted: TargetModel) -> SourceCheckpoint:
    """Converts a checkpoint to Hugging Face's names and order of rows.

    Args:
        source: a checkpoint of torchtitan.
        wanted: the model of the config, for its numbers of heads.

    Raises:
        CheckpointError: the config's model is not a Llama.
    """
    config = wanted.hf_config
    if config.get("model_type") != "llama":
        raise CheckpointError(
            f"{source.path} has torchtitan's names, and the config's model is a {config.get('model_type')}\n"
            "  try: model_type llama; others are not read: save them with torchtitan's to_hf, by"
            " checkpoint.last_save_in_hf, for the weights alone"
        )
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    return replace(
        source,
        kind="torchtitan (Llama)",
        weights=_renamed(source.weights, heads, kv_heads),
        states={kind: _renamed(tensors, heads, kv_heads) for kind, tensors in source.states.items()},
        members=(),  # members of fused projections have no single name
    )


def _renamed(tensors: Mapping[str, LazyTensor], heads: int, kv_heads: int) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        layer = _LAYER.fullmatch(name)
        inner = layer[2].replace("qkv_linear.", "") if layer else ""
        prefix = f"model.layers.{layer[1]}." if layer else ""
        if inner == _FUSED:
            found |= {prefix + own: part for own, part in _split(tensor, heads, kv_heads).items()}
        elif inner in _ROTATED:
            count = heads if inner == "attention.wq.weight" else kv_heads
            found[prefix + _ROTATED[inner]] = _changed(tensor, tensor.shape, partial(half_apart, heads=count))
        elif not _COMPUTED.search(name):
            # an unknown name stays, and is refused when names are compared with the config's model
            found[prefix + _IN_LAYER[inner] if inner in _IN_LAYER else _WHOLE.get(name, name)] = tensor
    return found


def half_apart(rows: Tensor, *, heads: int) -> Tensor:
    """Reorders the rows of a projection [heads x head size, D] for Hugging Face: in each head, even rows first."""
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _changed(tensor: LazyTensor, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> LazyTensor:
    return LazyTensor(shape, tensor.dtype, lambda: change(tensor.read()))


def _split(tensor: LazyTensor, heads: int, kv_heads: int) -> dict[str, LazyTensor]:
    """Splits a fused projection [kv_heads x (query heads of one + 2) x head size, D] into queries, keys, values."""
    per_key, width = heads // kv_heads, tensor.shape[1]
    size = tensor.shape[0] // (kv_heads * (per_key + 2))

    def part(first: int, count: int) -> Callable[[Tensor], Tensor]:
        return lambda t: t.view(kv_heads, per_key + 2, size, width)[:, first : first + count].reshape(-1, width)

    queries, keys, values = part(0, per_key), part(per_key, 1), part(per_key + 1, 1)
    kv_shape = (kv_heads * size, width)
    return {
        "self_attn.q_proj.weight": _changed(
            tensor, (heads * size, width), lambda t: half_apart(queries(t), heads=heads)
        ),
        "self_attn.k_proj.weight": _changed(tensor, kv_shape, lambda t: half_apart(keys(t), heads=kv_heads)),
        "self_attn.v_proj.weight": _changed(tensor, kv_shape, values),
    }
