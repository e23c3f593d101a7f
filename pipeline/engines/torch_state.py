"""The state of the native engine as named shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.checkpoint import named_state
from pipeline.checkpoint.shards import NamedShard
from pipeline.engines.common import MOMENTS, ensure_state
from pipeline.engines.torch_sharding import Part


@torch.no_grad()
def named_shards(parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> dict[str, NamedShard | Tensor]:
    """This rank's part of weights and moments, as views; and the optimizer's step, a copy."""
    named: dict[str, NamedShard | Tensor] = {}
    step = torch.zeros((), dtype=torch.float32)
    for part in parts:
        part.attach()
        state = ensure_state(optimizer, part.master)
        named[named_state.weight_key(part.name)] = part.named(part.master.data)
        for moment in MOMENTS:
            named[named_state.moment_key(moment, part.name)] = part.named(state[moment])
        step = state["step"].detach().to("cpu", copy=True)
    return {**named, named_state.OPTIMIZER_STEP: step}


@torch.no_grad()
def set_step(parts: Sequence[Part], optimizer: torch.optim.Optimizer, step: Tensor) -> None:
    """Sets AdamW's step counter everywhere."""
    for part in parts:
        ensure_state(optimizer, part.master)["step"].copy_(step)
