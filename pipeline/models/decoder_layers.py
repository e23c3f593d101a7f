"""Finds the base model of a Hugging Face model, and its decoder layers by index."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def base_of(causal: Any) -> nn.Module:
    """Returns a causal model's base model, also where transformers' prefix names no module (Llama 4)."""
    base: nn.Module = causal.base_model
    if base is not causal:
        return base
    lists = (each for each in causal.children() if any(isinstance(one, nn.ModuleList) for one in each.modules()))
    return next(lists, base)


def decoder_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Maps index to decoder layer of a Hugging Face model; a pipeline stage's layers keep their index in the model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {i: each for one in lists for i, each in enumerate(one) if isinstance(each, GradientCheckpointingLayer)}
