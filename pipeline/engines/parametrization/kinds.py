"""Kinds of parameters by Hugging Face name: the role of each parameter in a parametrization.

Only architectures whose residual stream is `x + branch(norm(x))` are supported: a norm after the branch, a multiplier
in the config or experts would change the rules.
"""

from __future__ import annotations

import re
from enum import StrEnum

from foundation.errors import ConfigError


class ParameterKind(StrEnum):
    """Kind of a parameter in the rules of muP and CompleteP."""

    EMBEDDING = "embedding"
    """Embedding of tokens or positions: its input has a fixed size."""
    HIDDEN = "hidden weight"
    """Matrix within a residual branch, except its last."""
    BRANCH_OUTPUT = "last weight of a branch"
    """Last matrix of a residual branch, which carries the multiplier of the branch."""
    BLOCK_VECTOR = "norm or bias in a layer"
    BRANCH_BIAS = "bias of the last weight of a branch"
    FINAL_NORM = "final norm"
    HEAD = "output head"
    """Head that is not tied to the embedding."""


Patterns = tuple[tuple[str, ParameterKind], ...]

_LLAMA: Patterns = (
    (r"embed_tokens\.weight", ParameterKind.EMBEDDING),
    (r"layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.weight", ParameterKind.HIDDEN),
    (r"layers\.\d+\.(self_attn\.o_proj|mlp\.down_proj)\.weight", ParameterKind.BRANCH_OUTPUT),
    (r"layers\.\d+\.(self_attn\.o_proj|mlp\.down_proj)\.bias", ParameterKind.BRANCH_BIAS),
    (
        r"layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight",
        ParameterKind.BLOCK_VECTOR,
    ),
    (r"layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.bias", ParameterKind.BLOCK_VECTOR),
    (r"norm\.weight", ParameterKind.FINAL_NORM),
    (r"lm_head\.weight", ParameterKind.HEAD),
)
_GPT2: Patterns = (
    (r"w[tp]e\.weight", ParameterKind.EMBEDDING),
    (r"h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.weight", ParameterKind.HIDDEN),
    (r"h\.\d+\.(attn|mlp)\.c_proj\.weight", ParameterKind.BRANCH_OUTPUT),
    (r"h\.\d+\.(attn|mlp)\.c_proj\.bias", ParameterKind.BRANCH_BIAS),
    (r"h\.\d+\.(ln_[12]\.(weight|bias)|attn\.c_attn\.bias|mlp\.c_fc\.bias)", ParameterKind.BLOCK_VECTOR),
    (r"ln_f\.(weight|bias)", ParameterKind.FINAL_NORM),
    (r"lm_head\.weight", ParameterKind.HEAD),
)
FAMILIES: dict[str, Patterns] = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "gpt2": _GPT2}
"""`model_type` -> patterns of parameter names, after `model.` or `transformer.`."""

_PREFIX = re.compile(r"^(model|transformer)\.")


def kind_of(model_type: str, name: str) -> ParameterKind:
    """Returns the kind of a parameter.

    Args:
        model_type: model type of the Hugging Face config, e.g. llama.
        name: Hugging Face name.

    Raises:
        ConfigError: the architecture or the parameter has no known rules.
    """
    if model_type not in FAMILIES:
        why = f"{model_type} has no CompleteP rules: they are known for {', '.join(FAMILIES)}"
        remedy = "use one of them, or the standard parametrization"
        raise ConfigError("model.parametrization", "completep", why=why, remedy=remedy)
    short = _PREFIX.sub("", name)
    for pattern, kind in FAMILIES[model_type]:
        if re.fullmatch(pattern, short):
            return kind
    why = f"there is no CompleteP rule for {name}"
    raise ConfigError("model.parametrization", "completep", why=why, remedy="use the standard parametrization")
