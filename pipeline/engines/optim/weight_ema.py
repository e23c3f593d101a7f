"""EMA of the weights (`run.ema`): one more fp32 state of each parameter in the optimizer, sharded like the others.

After every update, average = decay * average + (1 - decay) * weight, in one fused operation on the device. The average
begins with the initial weights, or with those of a checkpoint that has none. An update that is vetoed leaves it as it
is, also where only the device knows of the veto.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.format.shard_table import State
from pipeline.checkpoint.named_state import averaged_parts
from pipeline.config.sections.optimizers import EMA
from pipeline.config.sections.run import EmaSection
from pipeline.engines.base import Engine


def attach_ema(optimizer: torch.optim.Optimizer, section: EmaSection | None) -> None:
    """Makes an optimizer update the averages of its parameters after each of its steps; does nothing without a section.

    The averages are states of the optimizer, which `ensure_state` creates.
    """
    if section is not None:
        optimizer.register_step_post_hook(partial(_update, decay=section.decay))


@torch.no_grad()
def _update(optimizer: Any, _args: Any, _kwargs: Any, *, decay: float) -> None:
    vetoed: Tensor | None = getattr(optimizer, "found_inf", None)
    rate: Any = 1 - decay if vetoed is None else (1 - decay) * (1 - vetoed)
    for group in optimizer.param_groups:
        weights = [each.detach() for each in group["params"]]
        averages = [optimizer.state[each][EMA] for each in group["params"]]
        on_device = isinstance(rate, Tensor) and rate.is_cuda  # a number would have to be read by the host
        if weights:  # ZeRO-3 empties groups between the updates of its sub-groups
            torch._foreach_lerp_(averages, weights, [rate] * len(weights) if on_device else float(rate))


@contextmanager
def averaged_weights(engine: Engine) -> Iterator[None]:
    """Lets an engine compute with the averages; at the end the weights are as before, bit for bit. Collective."""
    with engine.edit_state() as state:
        _swap(state)
    try:
        yield
    finally:
        with engine.edit_state() as state:
            _swap(state)


@torch.no_grad()
def _swap(state: State) -> None:
    for _, weight, average in averaged_parts(state):
        kept = weight.clone()
        weight.copy_(average)
        average.copy_(kept)
