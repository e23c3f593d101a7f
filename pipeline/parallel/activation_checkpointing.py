"""Activation checkpointing, full or selective: activations are recomputed in the backward pass instead of stored.

Applied through the switch that every Hugging Face decoder layer has, so that parameter names do not change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.base.errors import ConfigError
from pipeline.config.schema import MemorySection

_SAVED_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Operators whose outputs selective checkpointing saves: they cost the most compute time per byte saved."""


def check_activation_checkpointing(model: nn.Module, memory: MemorySection) -> None:
    """Refuses activation checkpointing for a model whose layers do not support it.

    Raises:
        ConfigError: it is enabled and not supported.
    """
    if memory.activation_checkpointing != "none" and not _layers(model):
        kind = model.config.model_type  # type: ignore[union-attr]
        why = f"the layers of {kind} do not support it in transformers"
        raise ConfigError(
            "memory.activation_checkpointing", memory.activation_checkpointing, why=why, remedy="use none"
        )


def apply_activation_checkpointing(model: nn.Module, memory: MemorySection) -> None:
    """Enables activation checkpointing in every n-th decoder layer of a model.

    Raises:
        ConfigError: as `check_activation_checkpointing`.
    """
    if memory.activation_checkpointing == "none":
        return
    checkpointing: Any = partial(checkpoint, use_reentrant=False)
    if memory.activation_checkpointing == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        checkpointing = partial(checkpointing, context_fn=contexts)
    for index, layer in enumerate(_layers(model)):
        if index % memory.every_n_layers == 0:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = checkpointing


def _layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
