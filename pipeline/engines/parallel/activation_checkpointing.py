"""Activation checkpointing, full or selective: activations are recomputed in the backward pass instead of stored.

It is applied to the forward pass of Hugging Face's decoder layers, so that parameter names do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from foundation.errors import ConfigError
from pipeline.config.sections.run import MemorySection
from pipeline.engines.parallel.collectives import host_sizes

_SAVED_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_mm.default,  # fp8 products, and the largest values from which their scales are computed
    torch.ops.aten.max.default,
    torch.ops.aten.amax.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    host_sizes._opoverload,
}
"""Operators whose outputs selective checkpointing saves: they cost the most time per byte saved. Recomputation repeats
the all-gathers of tensor parallelism: their outputs are tp times a rank's tensors (for tp 8, more than all other
recomputation saves). It also repeats ring attention's messages, since other ranks' keys and values are not stored."""


WITHIN = "forward_within_checkpoint"
"""Attribute of a checkpointed layer: its forward pass without checkpointing, which may be replaced."""


def check_activation_checkpointing(model: nn.Module, memory: MemorySection) -> None:
    """Refuses activation checkpointing for a model whose layers do not support it.

    Raises:
        ConfigError: activation checkpointing is enabled and not supported.
    """
    if memory.activation_checkpointing != "none" and not _layers(model):
        kind = model.config.model_type  # type: ignore[union-attr]
        why = f"the layers of {kind} do not support it in transformers"
        raise ConfigError(
            "memory.activation_checkpointing", memory.activation_checkpointing, why=why, remedy="use none"
        )


def apply_activation_checkpointing(model: nn.Module, memory: MemorySection, *, random: bool = False) -> None:
    """Enables activation checkpointing in every n-th decoder layer of a model.

    Args:
        model: the model; its layers are changed in place.
        memory: the config's section.
        random: whether layers may draw random numbers (dropout, router jitter), which recomputation draws again.
    """
    if memory.activation_checkpointing == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if memory.activation_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for index, layer in enumerate(_layers(model)):
        if index % memory.every_n_layers == 0:
            layer.forward = _checkpointed(layer, layer.forward, options)


def _checkpointed(layer: nn.Module, forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Wraps a layer's forward pass, to be run again in the backward pass. The layer's hooks stay outside."""
    setattr(layer, WITHIN, forward)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        within = getattr(layer, WITHIN)
        if not (layer.training and torch.is_grad_enabled()):
            return within(*args, **kwargs)
        return checkpoint(within, *args, **options, **kwargs)

    return recomputed


def restores_results() -> bool:
    """Whether selective checkpointing is recomputing, when saved operators do not run again."""
    return any(isinstance(mode, _CachedTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())


def not_restored() -> AbstractContextManager[Any]:
    """Returns a context in which a recomputation runs all operators again, even if their outputs were saved."""
    return _pop_mode_temporarily() if restores_results() else nullcontext()


def _layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
