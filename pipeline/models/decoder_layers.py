"""Finds the decoder layers of a Hugging Face model by index."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Maps index to decoder layer of a Hugging Face model; a pipeline stage's layers keep their index in the model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {i: each for one in lists for i, each in enumerate(one) if isinstance(each, GradientCheckpointingLayer)}
