"""Tiny models with a CompleteP parametrization whose base model is half as wide and half as deep."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from foundation.section import parse
from pipeline.config.sections.run import ModelSection
from pipeline.engines.parametrization.scales import Parametrization, find_parametrization
from pipeline.models.construction.meta import build_meta

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
BASE = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 8},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_inner": 96},
}
BASES: dict[str, dict[str, Any]] = {
    **{family: {**BASE, "num_hidden_layers": 2} for family in ("llama", "mistral", "qwen2", "qwen3")},
    "gpt2": {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2},
}


def section_of(family: str, *, base: dict[str, Any] | None = None, **changes: Any) -> ModelSection:
    """The `model` section of a family's tiny model: four layers, vocabulary 64, dropout off."""
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    layers = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    config = {"model_type": family, **CONFIGS[family], **layers, "vocab_size": 64, **quiet, **changes}
    raw = {"config": config, "parametrization": "completep", "base": BASES[family] if base is None else base}
    return parse(ModelSection, raw)


def meta_of(section: ModelSection) -> nn.Module:
    assert section.config is not None
    config = AutoConfig.for_model(**section.config)
    return build_meta(config, dtype=torch.float32, attn_implementation="eager")


def completep(family: str, **changes: Any) -> tuple[nn.Module, Parametrization]:
    """A family's tiny model on meta, and its parametrization."""
    section = section_of(family, **changes)
    model = meta_of(section)
    found = find_parametrization(section, model)
    assert found is not None
    return model, found
