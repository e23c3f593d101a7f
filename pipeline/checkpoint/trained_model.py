"""The model that a checkpoint's manifest describes, on meta."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from headrace.base.directory import Manifest
from pipeline.models.meta import build_meta, parameter_shapes


def trained_config(manifest: Manifest) -> PretrainedConfig:
    """Its Hugging Face config."""
    stored = dict(manifest.details["hf_config"])
    return AutoConfig.for_model(stored.pop("model_type"), **stored)


def attention_of(manifest: Manifest) -> str:
    """As trained; flash attention needs a GPU, and whoever reads a checkpoint does not."""
    trained = str(manifest.config["model"]["attn_implementation"])
    return "sdpa" if trained.startswith("flash") else trained


def trained_model(manifest: Manifest, *, dtype: torch.dtype) -> nn.Module:
    """The model, on meta.

    Raises:
        ConfigError: this version of transformers cannot build it.
    """
    return build_meta(trained_config(manifest), dtype=dtype, attn_implementation=attention_of(manifest))


def trained_shapes(manifest: Manifest) -> dict[str, torch.Size]:
    """Name -> full shape of its parameters.

    Raises:
        ConfigError: as `trained_model`.
    """
    return parameter_shapes(trained_model(manifest, dtype=torch.float32))
