"""The decoder layers of a Hugging Face model by their index."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Index -> decoder layer of a Hugging Face model; for a pipeline stage, its own layers by index in the model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {i: each for one in lists for i, each in enumerate(one) if isinstance(each, GradientCheckpointingLayer)}
