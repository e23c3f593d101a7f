"""Scales a model config down to any width, for scaling ladders: a smaller model with the same architecture and shape.

`shrink` makes the smallest model with the same code paths. `scale` keeps proportions, so that a law fitted to several
sizes holds for the next one. Width, feed-forward widths and depth shrink alike. If there are enough heads, their number
shrinks, otherwise their size. The standard deviation of initial values is proportional to 1 / sqrt(width).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from foundation.errors import ConfigError
from pipeline.models.folder.weight_files import HfFields
from pipeline.models.hf_config import known_keys, one_line
from pipeline.models.layers import global_value
from pipeline.models.resize.shrink import DERIVED, WIDTHS, minimum_depth, per_layer, repeated

_FEWEST_GROUPS = 8
"""Least number of key/value heads at which the number of heads is scaled; fewer would allow too few widths."""
_SMALLEST_HEAD, _HEAD_MULTIPLE, _WIDTH_MULTIPLE = 4, 2, 8
_FEWEST_LAYERS = 4
"""Smallest depth after scaling: a one-layer model differs from a two-layer model in more than size."""
_NOT_SCALED = (
    *(
        "kv_lora_rank",
        "q_lora_rank",
        "linear_num_key_heads",
        "mamba_n_heads",
        "mamba_num_heads",
        "state_size",
        "d_state",
    ),
    *("d_head", "word_embed_proj_dim", "rotary_dim", "per_layer_config", "hidden_size_per_layer_input"),
)
"""Keys of architectures with further sizes, which no rule here scales."""


def scale(config: PretrainedConfig, width: float) -> PretrainedConfig:
    """Makes the config of a smaller model.

    Args:
        config: config of the large model.
        width: ratio of the hidden sizes, in (0, 1]; the nearest possible ratio is used.

    Raises:
        ConfigError: the architecture has sizes that no rule scales, or transformers refuses the smaller sizes.
    """
    given = {key: value for key, value in config.to_dict().items() if key not in DERIVED}
    _check_known(config, given)
    alias = config.attribute_map
    heads, groups, head_size = _heads(config, given)
    if groups >= _FEWEST_GROUPS:
        small_groups, small_size = max(1, round(groups * width)), head_size
    else:
        small_groups = groups
        small_size = max(_SMALLEST_HEAD, _HEAD_MULTIPLE * round(head_size * width / _HEAD_MULTIPLE))
    small_heads = small_groups * heads // groups
    ratio = small_heads * small_size / (heads * head_size)
    hidden = round(config.hidden_size * ratio)
    total = int(config.num_hidden_layers)
    depth = min(total, minimum_depth(given, total, _depth(total, ratio)))
    small: HfFields = {**given}
    small |= {key: repeated(value, depth) for key, value in given.items() if per_layer(key, value, total)}
    small |= {key: _wide(value, ratio) for key, value in small.items() if key in WIDTHS and value}
    small |= {alias.get("num_hidden_layers", "num_hidden_layers"): depth}
    small |= {alias.get("num_attention_heads", "num_attention_heads"): small_heads}
    small |= {alias.get("hidden_size", "hidden_size"): hidden}
    small |= {key: small_groups for key in ("num_key_value_heads",) if given.get(key)}
    small |= {key: small_size for key in ("head_dim",) if given.get(key)}
    if given.get("initializer_range"):
        small["initializer_range"] = given["initializer_range"] / ratio**0.5
    try:
        scaled = type(config).from_dict(small)
    except Exception as error:  # each architecture validates in its own way
        why = f"a {config.model_type} of width {hidden} cannot be built: {one_line(error)}"
        raise ConfigError("model.config", config.model_type, why=why, remedy="use another architecture") from None
    assert isinstance(scaled, PretrainedConfig)
    return scaled


def section_of(scaled: PretrainedConfig, original: PretrainedConfig, given: Mapping[str, Any] | None) -> HfFields:
    """Converts a scaled config to the `model.config` section of a training config.

    Args:
        scaled: config from `scale`.
        original: config of the large model.
        given: the large model's section, whose unscaled keys are kept; None if the model is a folder.
    """
    known = known_keys(scaled.model_type)
    before = original.to_dict()
    after = {key: value for key, value in scaled.to_dict().items() if key in known and key not in DERIVED}
    changed = {key: value for key, value in after.items() if value is not None and value != before.get(key)}
    if given is not None:
        kept = {key: value for key, value in given.items() if original.attribute_map.get(key, key) not in changed}
        return {**kept, **changed}
    return {**{key: value for key, value in after.items() if value is not None}, "model_type": scaled.model_type}


def _depth(total: int, ratio: float) -> int:
    return min(total, max(round(total * ratio), _FEWEST_LAYERS))


def _heads(config: PretrainedConfig, given: HfFields) -> tuple[int, int, int]:
    """Returns heads, key/value heads and head size."""
    heads = int(global_value(config, "num_attention_heads"))
    groups = int(given.get("num_key_value_heads") or heads)
    return heads, groups, int(given.get("head_dim") or config.hidden_size // heads)


def _wide(value: Any, ratio: float) -> Any:
    if isinstance(value, list):
        return [_wide(each, ratio) for each in value]
    return max(1, round(value * ratio / _WIDTH_MULTIPLE)) * _WIDTH_MULTIPLE


def _check_known(config: PretrainedConfig, given: HfFields) -> None:
    remedy = "use an architecture with plain attention, e.g. llama, qwen3, mistral or qwen3_moe"
    if global_value(config, "num_attention_heads") is None:
        raise ConfigError("model.config.model_type", config.model_type, why="it has no attention heads", remedy=remedy)
    found = [key for key in _NOT_SCALED if given.get(key)]
    rope = given.get("rope_parameters")
    if isinstance(rope, dict) and any(isinstance(value, list) for value in rope.values()):
        found.append("rope_parameters")
    if found:
        why = f"{config.model_type} has {', '.join(found)}, and how it scales with the width is not known"
        raise ConfigError("model.config.model_type", config.model_type, why=why, remedy=remedy)
