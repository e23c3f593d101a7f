"""Activation checkpointing: parts of the forward pass are computed again in the backward pass instead of kept.

Applied through the switch that every Hugging Face decoder layer has, so that names do not change.
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

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Operators whose results selective recomputation keeps: they cost the most time per byte kept."""


def check_activation_checkpointing(model: nn.Module, memory: MemorySection) -> None:
    """Refuses recomputation in a model whose layers do not have the switch.

    Raises:
        ConfigError: it is asked for and not offered.
    """
    if memory.activation_checkpointing != "none" and not _layers(model):
        kind = model.config.model_type  # type: ignore[union-attr]
        why = f"the layers of {kind} do not offer it in transformers"
        given = memory.activation_checkpointing
        raise ConfigError("memory.activation_checkpointing", given, why=why, remedy="use none")


def apply_activation_checkpointing(model: nn.Module, memory: MemorySection) -> None:
    """Switches recomputation on in every n-th decoder layer of a model.

    Raises:
        ConfigError: as `check_activation_checkpointing`.
    """
    if memory.activation_checkpointing == "none":
        return
    run: Any = partial(checkpoint, use_reentrant=False)
    if memory.activation_checkpointing == "selective":
        run = partial(run, context_fn=partial(create_selective_checkpoint_contexts, _policy))
    for number, layer in enumerate(_layers(model)):
        if number % memory.every_n_layers == 0:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = run


def _layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
