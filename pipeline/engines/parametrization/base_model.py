"""The base model of a parametrization on meta: the architecture's own at the sizes of `model.base`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from headrace.base.errors import ConfigError
from pipeline.config.sections.parametrization import BaseModelSection
from pipeline.config.sections.run import ModelSection
from pipeline.models.construction.meta import build_meta


def build_base(section: ModelSection, config: PretrainedConfig) -> nn.Module:
    """Builds the base model on meta.

    Args:
        section: the config's `model`, with `base`.
        config: Hugging Face config of the model that is trained.

    Raises:
        ConfigError: the sizes are none of this architecture, or the head size or the query heads per key/value head
            are not the model's.
    """
    assert section.base is not None
    base = _base_config(section.base, config)
    _check_heads(section, base, config)
    return build_meta(base, dtype=torch.float32, attn_implementation="eager")


def _base_config(sizes: BaseModelSection, config: PretrainedConfig) -> PretrainedConfig:
    base = copy.deepcopy(config)
    for key, value in sizes.model_dump(exclude_none=True).items():
        if key == "intermediate_size" and hasattr(base, "n_inner"):  # GPT-2's name, which is no alias
            base.n_inner = value
            continue
        if not hasattr(base, key):
            why = f"{config.model_type} has no such size"
            raise ConfigError(f"model.base.{key}", value, why=why, remedy="remove it")
        setattr(base, key, value)
    layers = base.num_hidden_layers
    kinds: Any = getattr(base, "layer_types", None)
    if kinds:
        base.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
    return base


def _check_heads(section: ModelSection, base: PretrainedConfig, config: PretrainedConfig) -> None:
    """Refuses another head size or sharing of key/value heads than the model's: width grows by the number of heads."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    free = bool(section.config and section.config.get("head_dim"))  # given, and no quotient of the hidden size
    if not free and base.hidden_size != size * base.num_attention_heads:
        why = f"at hidden_size {base.hidden_size} heads would not have {size} dimensions, as the model's have"
        near = max(base.hidden_size // size, 1)
        remedy = f"use {near} heads" + ("" if near * size == base.hidden_size else f" and hidden_size {near * size}")
        raise ConfigError("model.base.num_attention_heads", base.num_attention_heads, why=why, remedy=remedy)
    base_shared, shared = (_queries_per_key(each) for each in (base, config))
    if base_shared != shared:
        why = f"{base_shared:g} query heads share a key/value head, and {shared:g} in the model"
        near = max(round(base.num_attention_heads / shared), 1)
        remedy = f"use {near} key/value heads" if near * shared == base.num_attention_heads else "choose other heads"
        raise ConfigError("model.base.num_key_value_heads", base.num_key_value_heads, why=why, remedy=remedy)


def _queries_per_key(config: PretrainedConfig) -> float:
    return float(
        config.num_attention_heads / (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    )
