"""Measures all-gathers and reduce-scatters as FSDP2 runs them: with its hooks, its buffers, and copies in and out.

On a CPU new buffers and copies take as long as the collective, and torch builds gloo's reduce-scatter from an
all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeline.plan.calibration.measure import Ends, range_of, timed

LAYERS = 4
"""Units in sequence, as in a model: the buffers of one are free when the next needs some."""

REPEATS = 21
"""Forward and backward passes that are measured at each size."""

_WIDTH = 64


class _Touch(torch.autograd.Function):
    """An operator that takes a weight without computing; its gradient has the weight's size and arbitrary values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.size = weight.size()
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        [gradient] = gradients
        return gradient, torch.empty(ctx.size, device=gradient.device)


class _Layer(nn.Module):
    """A layer with a weight of `size` bytes."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size // 4 // _WIDTH, _WIDTH, device=device))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = _Touch.apply(values, self.weight)
        return result


def sharding(size: int, *, ranks: int, device: torch.device) -> tuple[Ends, Ends]:
    """Least, median and most seconds of an all-gather of a unit's weights, and of a reduce-scatter of its gradients.

    Collective: all ranks call it.

    Args:
        size: bytes of the unit's weights in fp32, a multiple of 256 x ranks.
        ranks: number of ranks over which the weights are sharded.
        device: this rank's device.
    """
    mesh = init_device_mesh(device.type, (ranks,))
    root: Any = nn.Sequential(*(_Layer(size, device) for _ in range(LAYERS)))
    for layer in root:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)
    for module in (*root, root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # as the engine: gloo has no scaled sum
    values = torch.ones(1, device=device, requires_grad=True)
    gathers, scatters = [], []
    for _ in range(2 + REPEATS):
        loss: list[Tensor] = []
        gathers.append(timed(lambda loss=loss: loss.append(root(values)), device) / LAYERS)  # type: ignore[misc]
        scatters.append(timed(lambda loss=loss: loss[0].sum().backward(), device) / LAYERS)  # type: ignore[misc]
    return range_of(gathers[2:]), range_of(scatters[2:])
