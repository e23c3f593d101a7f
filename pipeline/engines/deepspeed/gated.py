"""An optimizer that asks before it updates: what ZeRO is given to wrap.

ZeRO's optimizers take the gradient's norm, unscale and clip, and then call `step` of the optimizer they wrap, once for
all flat tensors (`BF16_Optimizer`), per parameter group (stages 1 and 2) or per sub-group (stage 3). Nothing that
outlives the step has been changed by then, and what they do afterwards is to copy the fp32 weights into the model's and
to drop the gradients. So an update is left out here, whole, and the engine needs no mending. Where the norm is not
finite they leave the update out by themselves and do not call. Seen with deepspeed 0.19.8: `step` in
`runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py` (state on a disk is brought in and written back as it was)
and `runtime/bf16_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def with_update_gate(optimizer: Opt, permits: Callable[[], bool]) -> Opt:
    """Has an optimizer update only where that is permitted.

    It stays of its own class: DeepSpeed knows the optimizers it trusts by their exact type.

    Args:
        optimizer: gets another `step`.
        permits: whether to make the update that comes; the same answer for all calls of one step.
    """
    update = optimizer.step

    def step(closure: Any = None) -> None:
        assert closure is None
        if permits():
            update()

    optimizer.step = step  # type: ignore[method-assign, assignment]
    return optimizer
