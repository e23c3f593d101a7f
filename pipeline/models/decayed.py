"""Selects the parameters that an optimizer decays."""

from __future__ import annotations

from torch import nn

_STATE_SPACE = ("A_log", "D")
"""Parameters that Mamba does not decay (Gu and Dao 2023, `mamba_simple.py`); transformers does not always mark them."""


def is_decayed(model: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter of a whole model; it does not apply to norms and biases."""
    if parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False):
        return False
    owner, _, leaf = name.rpartition(".")
    if leaf == "weight":  # a layer's weight, even with a single output
        return True
    if leaf in _STATE_SPACE and hasattr(model.get_submodule(owner), "A_log"):
        return False
    # biases of stacked experts [E, F] and of heads [H, F]; vectors [1, 1, D]
    return not leaf.endswith("bias") and sum(size > 1 for size in parameter.shape) >= 2
