"""Layer selection (depth pruning at load time): the config of the kept layers, and the renaming of their parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.models.folder.weight_files import HfFields

_LAYER = re.compile(r"^(.*?\.(?:layers|layer|h|blocks)\.)(\d+)(\..*)$")


def keep_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """Makes the config of a model with only `layers` of the original, in that order.

    Raises:
        ConfigError: a layer index does not exist in the model, or is given twice.
    """
    total = config.num_hidden_layers
    if not layers or len(set(layers)) != len(layers) or max(layers) >= total:
        why = f"the model has layers 0 to {total - 1}, and each may be kept once"
        every_other = list(range(0, total, 2))
        raise ConfigError("model.keep_layers", list(layers), why=why, remedy=f"e.g. {every_other}")
    if differ(config):
        why = "its config names single layers by their numbers (per_layer_config)"
        raise ConfigError("model.keep_layers", list(layers), why=why, remedy="remove it, or use another model")
    if getattr(config, "num_kv_shared_layers", None):
        why = "its last layers attend to the keys of layers before them (num_kv_shared_layers), wherever these are"
        raise ConfigError("model.keep_layers", list(layers), why=why, remedy="keep all layers, or use another model")
    kept = copy.deepcopy(config)
    kept.num_hidden_layers = len(layers)
    for key, value in of_kept_layers(config.to_dict(), layers, total=total).items():
        setattr(kept, key, value)
    return kept


_NUMBERS = ("mlp_only_layers", "attn_layer_indices", "moe_layers", "full_attn_idxs", "global_attn_layers")
"""Keys whose values are lists of layer numbers."""
_FIRST = ("first_k_dense_replace", "num_dense_layers")
"""Keys for the number of layers without experts at the beginning."""
_TOTAL = "num_blocks"
"""Second key for the number of layers, in configs that also have num_hidden_layers (xLSTM)."""


def of_kept_layers(fields: HfFields, layers: Sequence[int], *, total: int) -> HfFields:
    """Returns a config's keys that refer to single layers, with new values for the kept layers.

    They are lists with one entry per layer (layer_types, no_rope_layers), lists of layer numbers (mlp_only_layers), a
    number of first layers (first_k_dense_replace), the ends of a range (moe_layer_start_index), and a period
    (decoder_sparse_step; its layers become a list of numbers). `check_kept_layers` detects any other dependence on a
    layer's position.
    """
    new: HfFields = {}
    for key, value in fields.items():
        if key in _NUMBERS and isinstance(value, list):
            new[key] = [at for at, layer in enumerate(layers) if layer in value]
        elif isinstance(value, list) and len(value) == total and "layer" in key:
            new[key] = [value[layer] for layer in layers]
        elif key in _FIRST and isinstance(value, int):
            new[key] = sum(layer < value for layer in layers)
        elif key == _TOTAL and value == total:
            new[key] = len(layers)
    first, last = fields.get("moe_layer_start_index"), fields.get("moe_layer_end_index")
    if isinstance(first, int):
        end = last if isinstance(last, int) and last >= 0 else total - 1
        inside = [at for at, layer in enumerate(layers) if first <= layer <= end]
        new |= {
            "moe_layer_start_index": min(inside, default=len(layers)),
            "moe_layer_end_index": max(inside, default=-1),
        }
    step = fields.get("decoder_sparse_step")
    if isinstance(step, int) and step > 1:
        dense = [*(fields.get("mlp_only_layers") or []), *(n for n in range(total) if (n + 1) % step)]
        new |= {"decoder_sparse_step": 1, "mlp_only_layers": [at for at, n in enumerate(layers) if n in dense]}
    return new


def differ(config: PretrainedConfig) -> bool:
    """Whether layers have different sizes (Gemma 4: larger heads in the layers with full attention)."""
    return bool(getattr(config, "is_heterogeneous", False))


def global_value(config: PretrainedConfig, key: str) -> Any:
    """Returns a value of a config, or None; if some layers have their own values, the value of all others."""
    if not differ(config):
        return getattr(config, key, None)
    return config.to_dict().get(config.attribute_map.get(key, key))


_WITHOUT_ATTENTION = ("linear_attention", "conv", "mlp", "moe")
"""Transformers' `layer_types` of layers whose cost does not grow with the sequence: recurrent ones, and MLPs alone."""


_RECURRENT = frozenset(("linear_attention", "conv", "hybrid"))
"""Transformers' `layer_types` of layers with a state or a convolution, alone or beside attention."""


def is_recurrent(config: PretrainedConfig | None) -> bool:
    """Whether layers of a model mix positions by other means than attention, as far as its config says."""
    return not _RECURRENT.isdisjoint(getattr(config, "layer_types", None) or ())


def attention_widths(config: PretrainedConfig) -> list[int]:
    """Returns heads x head size of every layer; zeros for a layer or a model without attention heads."""
    layers: Any = config.per_layer_config if differ(config) else [config] * config.num_hidden_layers
    kinds = enumerate(getattr(config, "layer_types", None) or ())
    without = {number for number, kind in kinds if kind in _WITHOUT_ATTENTION}
    return [0 if number in without else _attention_width(layer) for number, layer in enumerate(layers)]


STATE_FLOPS = 6.0
"""FLOPs per element of a recurrent layer's state and token, forward: decay or read by the key (2), update by an outer
product (2), read by the query or the output matrix (2). Sources: gated delta rule (arXiv:2412.06464), equation 10; KDA
(arXiv:2510.26692), equation 1; Mamba-2 (arXiv:2405.21060), section 2; RG-LRU (arXiv:2402.19427), equations 3 and 4,
elementwise on one number per channel. Kernels that work by chunks compute more."""


def state_flops(config: PretrainedConfig) -> list[float]:
    """Returns the forward FLOPs per token on the recurrent state of every layer; zeros for layers without one.

    A state has heads x key size x value size elements (gated delta rule, KDA, lightning attention), channels x state
    size (Mamba), or one per channel (RG-LRU). Short convolutions count with their parameters.
    """
    kinds: Any = getattr(config, "layer_types", None) or ()
    found = [0.0] * config.num_hidden_layers
    elements = _state_elements(config)
    for number, kind in enumerate(kinds):
        if kind in ("linear_attention", "hybrid"):
            found[number] = STATE_FLOPS * elements
    return found


def _state_elements(config: Any) -> int:
    """Elements of a recurrent layer's state for one sequence, by the names of keys in transformers' configs."""
    heads = getattr(config, "linear_num_value_heads", None)
    if heads:
        return int(heads * config.linear_key_head_dim * config.linear_value_head_dim)
    if heads := getattr(config, "linear_num_heads", None):
        return int(heads * config.linear_head_dim**2)
    if config.model_type == "minimax":  # lightning attention has the heads of full attention
        return int(_attention_width(config) ** 2 // config.num_attention_heads)
    if width := getattr(config, "lru_width", None):
        return int(width)
    states = (getattr(config, name, None) for name in ("mamba_d_state", "ssm_state_size", "state_size"))
    state = next((each for each in states if each), 0)
    pairs = (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("hidden_size", "mamba_expand"))
    for first, second in pairs:
        if getattr(config, first, None) and isinstance(getattr(config, second, None), int):
            return int(getattr(config, first) * getattr(config, second) * state)
    return 0


def _attention_width(config: Any) -> int:
    """Heads x head size; in multi-head latent attention, the mean of the widths of queries and (narrower) values."""
    heads = getattr(config, "num_attention_heads", None)
    if heads and getattr(config, "kv_lora_rank", None):
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2)
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0


def original_name(layers: Sequence[int] | None) -> Callable[[str], str]:
    """Returns a function from a parameter's name in the model with `layers` kept to its name in the original model.

    Raises:
        ConfigError: (by the returned function) the model has more layers, since its config counts them differently.
    """

    def rename(name: str) -> str:
        match = _LAYER.match(name)
        if layers is None or match is None:
            return name
        if int(match[2]) >= len(layers):
            why = f"the architecture counts its layers by another key: with {len(layers)} kept it still has {name}"
            raise ConfigError(
                "model.keep_layers", list(layers), why=why, remedy="keep all layers, or use another model"
            )
        return f"{match[1]}{layers[int(match[2])]}{match[3]}"

    return rename
