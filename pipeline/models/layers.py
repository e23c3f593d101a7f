"""Layer selection (depth pruning at load time): the config of the kept layers, and the renaming of their parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PretrainedConfig

from headrace.base.errors import ConfigError

_LAYER = re.compile(r"^(.*?\.(?:layers|h|blocks)\.)(\d+)(\..*)$")


def keep_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The config of a model with only `layers` of the original, in that order.

    Raises:
        ConfigError: a layer index that the model does not have, or one given twice.
    """
    total = config.num_hidden_layers
    if not layers or len(set(layers)) != len(layers) or max(layers) >= total:
        why = f"the model has layers 0 to {total - 1}, and each may be kept once"
        every_other = list(range(0, total, 2))
        raise ConfigError("model.keep_layers", list(layers), why=why, remedy=f"e.g. {every_other}")
    if differ(config):
        why = "its config names single layers by their numbers (per_layer_config)"
        raise ConfigError("model.keep_layers", list(layers), why=why, remedy="remove it, or use another model")
    kept = copy.deepcopy(config)
    kept.num_hidden_layers = len(layers)
    for key, value in config.to_dict().items():
        # lists with one entry per layer, such as layer_types of models with sliding windows
        if isinstance(value, list) and len(value) == total and key.startswith("layer"):
            setattr(kept, key, [value[i] for i in layers])
    return kept


def differ(config: PretrainedConfig) -> bool:
    """Whether layers have sizes of their own (Gemma 4: larger heads in the layers with full attention)."""
    return bool(getattr(config, "is_heterogeneous", False))


def global_value(config: PretrainedConfig, key: str) -> Any:
    """A value of a config, or None; where it differs by layer, that of the layers without one of their own."""
    if not differ(config):
        return getattr(config, key, None)
    return config.to_dict().get(config.attribute_map.get(key, key))


def attention_widths(config: PretrainedConfig) -> list[int]:
    """Heads x head size of every layer; zeros of a model without attention heads."""
    layers: Any = config.per_layer_config if differ(config) else [config] * config.num_hidden_layers
    return [_attention_width(layer) for layer in layers]


def _attention_width(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None)
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0


def original_name(layers: Sequence[int] | None) -> Callable[[str], str]:
    """A function from a parameter's name in the model with `layers` kept to its name in the original one."""

    def rename(name: str) -> str:
        match = _LAYER.match(name)
        if layers is None or match is None:
            return name
        return f"{match[1]}{layers[int(match[2])]}{match[3]}"

    return rename
