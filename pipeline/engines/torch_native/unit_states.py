"""States of FSDP2's units for a forward and a backward pass that take turns within a micro-batch.

A unit of FSDP2 (torch 2.13) notes its state: IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD. The forward hooks of a unit in
a backward pass do nothing, since they are those of a recomputation, and the end of a backward pass makes all units
idle. So each pass has its own states, which are exchanged when the turn is.

The units of the two passes have to stay gathered (stages 0 to 2): the weights themselves are there once.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from pipeline.engines.torch_native.fsdp_units import sharded_modules


class UnitStates:
    """The states of the units of a root module, one set for each pass.

    Args:
        root: the FSDP2 root module.
    """

    def __init__(self, root: nn.Module) -> None:
        states: Any = dict.fromkeys(module._get_fsdp_state() for module in sharded_modules(root))
        self._states = [*states, *(group for state in states for group in state._fsdp_param_groups)]
        self._grouped = [state for state in states if len(state._modules) > 1]
        self._root: Any = root
        self._waiting: dict[int, tuple[Any, ...]] = {}

    def switch(self, ending: int, following: int) -> None:
        """Stores the states of the pass whose turn ends, and restores those of the next pass."""
        context = self._root._get_fsdp_state()._state_ctx
        self._waiting[ending] = (
            [each._training_state for each in self._states],
            [set(each._modules_to_run_forward) for each in self._grouped],
            context.iter_forward_root,
        )
        states, grouped, forward_root = self._waiting.pop(following, self._idle)
        for each, state in zip(self._states, states, strict=True):
            each._training_state = state
        for each, modules in zip(self._grouped, grouped, strict=True):
            each._modules_to_run_forward.clear()
            each._modules_to_run_forward.update(modules)
        context.iter_forward_root = forward_root

    @property
    def _idle(self) -> tuple[Any, ...]:
        """States of a pass that has not begun."""
        return [TrainingState.IDLE] * len(self._states), [set()] * len(self._grouped), None
