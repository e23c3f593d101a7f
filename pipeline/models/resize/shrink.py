"""Shrinks a model config to a tiny model of the same architecture, with the same code paths, for tests and proofs.

Settings that select code paths stay (layer types, tied embeddings, biases, windows, experts, grouped heads, an explicit
head size); only sizes are reduced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.config.rules.experts import EXPERTS
from pipeline.models.folder.weight_files import HfFields
from pipeline.models.hf_config import one_line
from pipeline.models.layers import global_value
from pipeline.models.resize.experts import DENSE_FIRST, depth_with_experts, few_experts, with_experts_inside

HEAD_SIZE = 8
"""Features of a head; the number of rotated features is even with partial_rotary_factor 0.25 to 1."""

WINDOW = 12
"""Positions of a sliding window: fewer than a short test sequence has."""

_SMALL = {
    # sizes specific to latent attention and linear attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    **dict.fromkeys(DENSE_FIRST, 1),
    "num_nextn_predict_layers": 0,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    # keys of single architectures (GPT-J, GPT-Neo, Gemma 4, LongCat-Flash, Bailing)
    "rotary_dim": HEAD_SIZE,
    "window_size": WINDOW,
    "hidden_size_per_layer_input": HEAD_SIZE,
    "zero_expert_num": 2,
}
_THRESHOLDS = (
    # the longest sequence with the short factors of longrope, or with the temperature 1 of Llama 4
    *("original_max_position_embeddings", "floor_scale"),
    # positions that sparse attention selects or keeps, and blocks of recurrences and linear attention
    *("index_topk", "indexer_budget", "keep_window_size", "attention_window_size"),
    *("chunk_size", "mamba_chunk_size", "block_size", "index_block_size"),
)
"""Keys for lengths at which a model's computation changes, except in YaRN's section."""
_OF_POSITIONS = re.compile(
    "position|length|window|chunk|block_size|budget|index_topk|floor_scale|context|compress_rate"
)
WIDTHS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"),
    *("ffn_dim", "ffn_hidden_size", "n_inner", "expert_ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("shared_intermediate_size", "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("dense_intermediate_size", "prefix_dense_intermediate_size", "moe_latent_size"),
)
_LAYERS, _SHARED = "num_hidden_layers", "num_kv_shared_layers"
_KINDS = 4
"""Largest number of distinct values in a list of layer types."""
_LISTS = ("intermediate_size", "activation_sparsity_pattern", "indexer_types")
"""Config keys with one list entry per layer, which their names do not show (Gemma 3n, GLM-5, HY 4)."""
_REMEDY = "use another architecture, or ZeRO or FSDP2 alone (no parallel.tp, pp or cp, no loss.chunk)"
_OTHER_HEADS = ("encoder_attention_heads", "decoder_attention_heads", "num_decoder_attention_heads")
DERIVED = ("qk_head_dim", "mamba_headdim", "transformers_version", "model_type", "architectures", "dtype")


def shrink(
    config: PretrainedConfig, *, divide: int, layers: int, vocab_size: int, lengths: tuple[int, int] | None = None
) -> PretrainedConfig:
    """Makes the config of a tiny model of the same architecture.

    Args:
        config: config of the real model.
        divide: number of ranks that share the heads in the layout to test (tp x cp). It divides the shrunk numbers of
            heads and key/value heads if it divides the real ones.
        layers: minimum number of decoder layers; more if needed for every layer type to appear.
        vocab_size: vocabulary size of the tiny model.
        lengths: positions of the real model's sequences, and of the tiny model's. A threshold below the first becomes
            at most half of the second. None keeps all thresholds.

    Raises:
        ConfigError: transformers does not accept the small sizes for this architecture.
    """
    alias = config.attribute_map
    recurrent = hasattr(config, "hidden_size") and hasattr(config, "vocab_size")
    if global_value(config, "num_attention_heads") is None and not recurrent:
        why = "it has no attention heads"
        raise ConfigError("model.config.model_type", config.model_type, why=why, remedy=_REMEDY)
    given = {k: v for k, v in config.to_dict().items() if k not in DERIVED}
    total = config.num_hidden_layers
    depth = max(minimum_depth(given, total, layers), depth_with_experts(given, total))
    shared = given.get(_SHARED) or 0
    if shared and depth < total:  # the last layers attend to the keys of the layers before them, of every type
        depth, shared = depth * 2, depth
    small: HfFields = {**given, "vocab_size": vocab_size}
    # LongCat-Flash computes num_hidden_layers as twice its num_layers
    small |= dict.fromkeys([key for key in (alias.get(_LAYERS, _LAYERS), "num_layers") if key in given][:1], depth)
    small |= {key: depth for key in ("num_blocks",) if given.get(key) == total}  # xLSTM has both
    small |= {key: shared for key in (_SHARED,) if shared}
    small |= {key: min(value, _SMALL[key]) for key, value in given.items() if key in _SMALL and isinstance(value, int)}
    small |= {key: repeated(value, depth) for key, value in given.items() if per_layer(key, value, total)}
    if given.get("attention_types"):  # GPT-Neo
        small["attention_types"] = [[small["attention_layers"], 1]]
    small |= {
        key: min(value, vocab_size - 1)
        for key, value in given.items()
        if key.endswith("_token_id") and isinstance(value, int)
    }
    small |= {key: vocab_size for key in ("vocab_size_per_layer_input",) if given.get(key)}
    # CodeGen lays out its projections for four devices
    if global_value(config, "num_attention_heads") is None:
        small |= _recurrent(given, alias)
    else:
        small |= _attention(config, given, math.lcm(divide, 4) if config.model_type == "codegen" else divide)
    hidden = small[alias.get("hidden_size", "hidden_size")]
    small |= _widths(given, config.hidden_size, hidden, divide, depth) | few_experts(given)
    small |= {
        key: {**inside, **_widths(inside, config.hidden_size, hidden, divide, depth), **few_experts(inside)}
        for key, inside in with_experts_inside(given)
    }
    small |= _rope(given, config)
    small |= _states(given, hidden)
    small |= _single_layers(given, small, depth)
    if lengths is not None:
        small = {key: _crossed(key, value, *lengths) for key, value in small.items()}
    try:
        shrunk = type(config).from_dict(small)
    except Exception as error:  # each architecture validates in its own way
        why = f"a tiny {config.model_type} to test the layout with cannot be built: {one_line(error)}"
        raise ConfigError("model.config.model_type", config.model_type, why=why, remedy=_REMEDY) from None
    assert isinstance(shrunk, PretrainedConfig)
    return shrunk


def not_reached(config: PretrainedConfig, *, lengths: tuple[int, int]) -> dict[str, int]:
    """Returns thresholds that the real model's sequences cross and the tiny model's do not: key -> positions.

    Args:
        config: config of the tiny model.
        lengths: positions of the real model's sequences, and of the tiny model's.
    """
    real, tiny = lengths
    found = dict(_integers(config.to_dict()))
    return {key: value for key, value in found.items() if _OF_POSITIONS.search(key) and tiny <= value < real}


def _is_yarn(value: Any) -> bool:
    """Tells YaRN's parameters: its original length is a constant of the frequencies, which no sequence crosses."""
    return isinstance(value, dict) and "yarn" in (value.get("rope_type"), value.get("type"))


def _integers(values: HfFields, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in values.items():
        if isinstance(value, dict) and not _is_yarn(value):
            yield from _integers(value, f"{prefix}{key}.")
        elif isinstance(value, int):
            yield prefix + key, value


def _crossed(key: str, value: Any, real: int, tiny: int) -> Any:
    """Sets a threshold so that `tiny` positions cross it if `real` positions do; other values stay unchanged."""
    if isinstance(value, dict) and not _is_yarn(value):
        return {name: _crossed(name, each, real, tiny) for name, each in value.items()}
    if key in _THRESHOLDS and isinstance(value, int):
        return min(value, tiny // 2) if value < real else max(value, tiny)
    return value


def minimum_depth(given: HfFields, total: int, layers: int) -> int:
    """Returns at least two layers, and enough for every layer type to appear (e.g. one global after five local ones).

    Zamba's "hybrid" layers share an attention block, for which transformers needs two such layers.
    """
    lists = [value for key, value in given.items() if per_layer(key, value, total)]
    # RecurrentGemma repeats a list that is shorter than the model
    cycles = [v for key, v in given.items() if key == "block_types" and isinstance(v, list) and len(v) < total]
    needed = [v.index(kind) + 1 for v in [*lists, *cycles] if len(set(v)) <= _KINDS for kind in set(v)]
    sharing = [[n for n, kind in enumerate(values, 1) if kind == "hybrid"][:2] for values in lists]
    return int(max(layers, 2, *needed, *(n for numbers in sharing for n in numbers)))


def per_layer(key: str, value: Any, total: int) -> bool:
    """Whether a value is a list with one entry for each of `total` layers."""
    return isinstance(value, list) and len(value) == total and ("layer" in key or key in _LISTS)


def repeated(values: list[Any], count: int) -> list[Any]:
    """Returns the first `count` values of a repeated list."""
    return [values[i % len(values)] for i in range(count)]


def _attention(config: PretrainedConfig, given: HfFields, divide: int) -> HfFields:
    """Returns the number and size of heads, and a hidden size in the original proportion to them."""
    alias = config.attribute_map
    heads = int(global_value(config, "num_attention_heads"))
    groups = int(given.get("num_key_value_heads") or heads)
    small_groups = math.gcd(groups, max(divide, 2))
    ratio = heads // groups
    ratios = [r for r in range(1, ratio + 1) if ratio % r == 0 and (r > 1 or ratio == 1)]
    common = math.gcd(heads, divide)
    small_heads = next(small_groups * r for r in ratios if small_groups * r % common == 0)
    sizes: HfFields = {alias.get("num_attention_heads", "num_attention_heads"): small_heads}
    sizes |= {key: small_heads for key in _OTHER_HEADS if given.get(key)}
    if given.get("num_key_value_heads"):
        sizes["num_key_value_heads"] = small_groups
    head_size = given.get("head_dim") or config.hidden_size // heads
    if given.get("head_dim"):
        sizes["head_dim"] = HEAD_SIZE
    hidden_size = _hidden_size(config.hidden_size / (heads * head_size), small_heads * HEAD_SIZE, unit=_unit(given))
    sizes[alias.get("hidden_size", "hidden_size")] = hidden_size
    if given.get("word_embed_proj_dim"):
        sizes["word_embed_proj_dim"] = hidden_size
    if "kv_n_heads" in (inside := given.get("attn_config") or {}):  # DBRX
        sizes["attn_config"] = {**inside, "kv_n_heads": small_groups}
    if given.get("attention_hidden_size") and "mamba_expand" in given:  # Zamba: attention on two hidden states
        ratio = given["attention_hidden_size"] // config.hidden_size
        sizes["attention_hidden_size"] = ratio * sizes["hidden_size"]
        sizes["attention_head_dim"] = sizes["attention_hidden_size"] // small_heads
    if given.get("d_head"):
        sizes["d_head"] = sizes[alias.get("hidden_size", "hidden_size")] // small_heads
    return sizes


def _recurrent(given: HfFields, alias: dict[str, str]) -> HfFields:
    """Returns sizes of a recurrent model without attention: a width of 32; Mamba-2 has four heads per 32 features."""
    sizes: HfFields = {alias.get("hidden_size", "hidden_size"): 4 * HEAD_SIZE}
    sizes |= {
        k: min(given[k], 2 * HEAD_SIZE) for k in ("state_size", "time_step_rank") if isinstance(given.get(k), int)
    }
    sizes |= {key: 4 * HEAD_SIZE for key in ("attention_hidden_size", "embedding_dim") if given.get(key)}  # RWKV, xLSTM
    sizes |= {"num_heads": 4} if given.get("num_heads") else {}
    if given.get("num_heads") and "expand" in given:
        heads = 4 * given["expand"]
        sizes |= {"num_heads": heads, "head_dim": HEAD_SIZE, "n_groups": math.gcd(given["n_groups"], heads)}
    return sizes


def _hidden_size(ratio: float, heads: int, *, unit: int) -> int:
    """Returns a multiple of `unit` near `ratio` times the width of all heads; equals that width only for ratio 1."""
    nearest = max(round(ratio * heads / unit) * unit, HEAD_SIZE)
    if nearest != heads or ratio == 1:
        return nearest
    return heads + unit if ratio > 1 or heads <= unit else heads - unit


def _unit(given: HfFields) -> int:
    """Divisor of widths: rows in experts' grouped products must be multiples of 16 bytes, eight bf16 numbers."""
    mixture = any(given.get(key) for key in EXPERTS) or any(True for _ in with_experts_inside(given))
    return 8 if mixture else 4


def _states(given: HfFields, hidden: int) -> dict[str, int]:
    """Returns the number and size of Mamba-2 heads, whose product must be the width of the layer (Bamba, Granite 4)."""
    if not all(isinstance(given.get(key), int) for key in ("mamba_n_heads", "mamba_d_head", "mamba_expand")):
        return {}
    width = given["mamba_expand"] * hidden
    if (
        given.get("mamba_d_ssm")
        or given["mamba_n_heads"] * given["mamba_d_head"] != given["mamba_expand"] * given["hidden_size"]
    ):
        return {}
    heads = math.gcd(given["mamba_n_heads"], max(width // HEAD_SIZE, 1))
    groups = math.gcd(given.get("mamba_n_groups") or 1, heads)
    return {"mamba_n_heads": heads, "mamba_d_head": width // heads, "mamba_n_groups": groups}


def _single_layers(given: HfFields, small: HfFields, depth: int) -> HfFields:
    """Returns the sizes of single layers that differ from the others, scaled in proportion to the small model."""
    own = given.get("per_layer_config")
    if not own:
        return {}

    def shrunk(key: str, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or not given.get(key) or not small.get(key):
            return value
        return max(round(value * small[key] / given[key]), 1)

    kept = {int(layer): values for layer, values in own.items() if int(layer) < depth}
    sizes = {n: {k: shrunk(k, v) for k, v in values.items()} for n, values in kept.items()}
    parts = ("qk_nope_head_dim", "qk_rope_head_dim")  # parts of a head (Dots 3)
    for number, values in kept.items():
        size = {**given, **values}.get("head_dim")
        whole = sum({**given, **values}.get(part) or 0 for part in parts)
        if whole and size == whole:
            sizes[number]["head_dim"] = sum({**small, **sizes[number]}[part] for part in parts)
    return {"per_layer_config": sizes}


def _widths(given: HfFields, hidden: int, small_hidden: int, divide: int, layers: int) -> HfFields:
    unit = math.lcm(4 * divide, _unit(given))

    def shrunk(width: int) -> int:
        return max(1, round(width / hidden * small_hidden / unit)) * unit

    widths = {key: shrunk(given[key]) for key in WIDTHS if isinstance(given.get(key), int)}
    lists = {key: [shrunk(each) for each in given[key]] for key in WIDTHS if isinstance(given.get(key), list)}
    return widths | {key: repeated(each, layers) for key, each in lists.items()}


def _rope(given: HfFields, config: PretrainedConfig) -> HfFields:
    """Returns RoPE parameters; lists with one factor per rotated pair (longrope) are truncated to the smaller head."""
    rope, heads = given.get("rope_parameters"), global_value(config, "num_attention_heads")
    if not isinstance(rope, dict) or heads is None:
        return {}
    head_size = given.get("head_dim") or config.hidden_size // heads

    def truncate(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: truncate(each) for key, each in value.items()}
        return value[: len(value) * HEAD_SIZE // head_size] if isinstance(value, list) else value

    return {"rope_parameters": truncate(rope)}
