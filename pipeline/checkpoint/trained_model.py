"""Builds the model that a checkpoint's manifest describes, on the meta device."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from headrace.base.directory import Manifest
from pipeline.models.meta import build_meta, parameter_shapes


def trained_config(manifest: Manifest) -> PretrainedConfig:
    """The Hugging Face config of the model."""
    stored = dict(manifest.details["hf_config"])
    return AutoConfig.for_model(stored.pop("model_type"), **stored)


def attention_implementation(manifest: Manifest) -> str:
    """That of the training, except flash attention, which needs a GPU; reading a checkpoint does not."""
    trained = str(manifest.config["model"]["attn_implementation"])
    return "sdpa" if trained.startswith("flash") else trained


def trained_model(manifest: Manifest, *, dtype: torch.dtype) -> nn.Module:
    """The model, on the meta device.

    Raises:
        ConfigError: this version of transformers cannot build it.
    """
    return build_meta(trained_config(manifest), dtype=dtype, attn_implementation=attention_implementation(manifest))


def trained_shapes(manifest: Manifest) -> dict[str, torch.Size]:
    """Parameter name -> full shape.

    Raises:
        ConfigError: as `trained_model`.
    """
    return parameter_shapes(trained_model(manifest, dtype=torch.float32))
