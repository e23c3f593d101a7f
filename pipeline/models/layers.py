"""Layer selection (depth pruning at load time): the config of the kept layers, and the renaming of their parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence

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
    kept = copy.deepcopy(config)
    kept.num_hidden_layers = len(layers)
    for key, value in config.to_dict().items():
        # lists with one entry per layer, such as layer_types of models with sliding windows
        if isinstance(value, list) and len(value) == total and key.startswith("layer"):
            setattr(kept, key, [value[i] for i in layers])
    return kept


def original_name(layers: Sequence[int] | None) -> Callable[[str], str]:
    """A function from a parameter's name in the model with `layers` kept to its name in the original one."""

    def rename(name: str) -> str:
        match = _LAYER.match(name)
        if layers is None or match is None:
            return name
        return f"{match[1]}{layers[int(match[2])]}{match[3]}"

    return rename
