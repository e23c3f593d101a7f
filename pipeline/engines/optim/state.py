"""The state of an optimizer: its creation before the first step, and its step counter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.config.sections.optimizers import EMA, OptimizerKind
from pipeline.engines.optim.groups import MATRICES
from pipeline.engines.optim.small_moments import AdamWSmallMoments

_COUNTER = "step"


@torch.no_grad()
def ensure_state(optimizer: torch.optim.Optimizer, parameter: Tensor, kind: OptimizerKind) -> dict[str, Tensor]:
    """Returns the state of one parameter; creates it as torch does at the first step if it does not exist yet.

    Every optimizer of `config.sections.optimizers` begins with zeros, and an EMA with the parameter. That holds for
    SGD, too: its first momentum is the gradient, which equals momentum x 0 + gradient without dampening.
    """
    state: dict[str, Tensor] = optimizer.state[parameter]
    for name in kind.states:
        if name not in state:
            if name == EMA:
                state[name] = parameter.detach().clone(memory_format=torch.preserve_format)
            elif isinstance(optimizer, AdamWSmallMoments):
                state.update(optimizer.empty_moment(parameter, name))
            else:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if kind.counts_steps and _COUNTER not in state:
        on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        state[_COUNTER] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    return state


def kind_of_group(kind: OptimizerKind, group: Mapping[str, Any]) -> OptimizerKind:
    """Returns the optimizer kind of the parameters in a group."""
    return kind.of(matrix=bool(group.get(MATRICES)))


def ensure_all_states(optimizer: torch.optim.Optimizer, kind: OptimizerKind) -> None:
    """Creates the state of every parameter.

    torch's fused SGD cannot make a step in which some parameters have momentum and others do not yet.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ensure_state(optimizer, parameter, kind_of_group(kind, group))


def step_counter(state: dict[str, Any]) -> Tensor:
    """Copies the step counter in a parameter's state to the CPU: fp32 scalar, 0 before the first step."""
    if _COUNTER not in state:
        return torch.zeros((), dtype=torch.float32)
    counter: Tensor = state[_COUNTER]
    return counter.detach().to("cpu", copy=True)


def set_step_counter(state: dict[str, Any], counter: Any) -> None:
    """Sets the step counter in a parameter's state; does nothing for an optimizer that has none (`counter` None)."""
    if counter is not None:
        state[_COUNTER].copy_(counter)
