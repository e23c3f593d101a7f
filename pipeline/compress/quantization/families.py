"""Norms of decoder layers and the layers they feed, for scaling channels without changing the model. No torch.

A norm's weight can take any factor per channel, if the linear layers that read its output are divided by it. In these
architectures nothing else reads the output. In others (a residual stream that takes the norm's output, parallel blocks,
norms behind a layer) the names below would miss some readers: these architectures are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from foundation.errors import ConfigError
from pipeline.models.folder.weight_files import HfFields


@dataclass(frozen=True)
class Family:
    """The norms of one decoder layer.

    Attributes:
        attention_norm: name of the norm that only the query, key and value projections read.
        mlp_norm: name of the norm that only gate and up projections and the router read.
        offset: number added to a norm's weight before it multiplies; 1 for Gemma.
        norms_outputs: whether norms also follow the layers: a rotation does not commute with them.
    """

    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    offset: float = 0.0
    norms_outputs: bool = False


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"), Family()),
    "gemma": Family(offset=1.0),
    "gemma2": Family(mlp_norm="pre_feedforward_layernorm", offset=1.0, norms_outputs=True),
}
"""`model_type` of config.json -> family."""


def family_of(config: HfFields, *, key: str, value: object) -> Family:
    """The family of a model.

    Args:
        config: the parsed config.json.
        key: key of our config that needs the family, for the message.
        value: value of that key.

    Raises:
        ConfigError: the architecture is not one of `FAMILIES`.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        why = f"the layers that read a norm are known for {', '.join(sorted(FAMILIES))}, not for {kind}"
        raise ConfigError(key, value, why=why, remedy="leave it out, or use method gptq alone")
    return FAMILIES[kind]
