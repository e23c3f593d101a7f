"""Differentiable all-gather and reduce-scatter; the backward pass of each is the other.

Shapes: B batch, T sequence, D features; `dim` is the gathered or scattered dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

functional: Any = torch.ops._c10d_functional
"""torch's functional collectives, which compiled graphs may contain and whose results selective recomputation saves."""


@torch.library.custom_op("headrace::host_sizes", mutates_args=())
def host_sizes(sizes: Tensor) -> Tensor:
    """Copies a tensor to the host, which waits for the device. Selective activation checkpointing keeps the copy."""
    return sizes.cpu().clone()


@host_sizes.register_fake
def _(sizes: Tensor) -> Tensor:
    return torch.empty_like(sizes, device="cpu")


def all_gather(part: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Concatenates the ranks' parts along `dim`. Backward: gradients are summed over the ranks and scattered."""
    gathered: Tensor = _AllGather.apply(part, group, dim)
    return gathered


def reduce_scatter(full: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Sums the ranks' tensors and returns this rank's part along `dim`. Backward: gradients are all-gathered."""
    part: Tensor = _ReduceScatter.apply(full, group, dim)
    return part


def _gathered(part: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    flat = part.movedim(dim, 0).contiguous()
    out: Tensor = functional.wait_tensor(functional.all_gather_into_tensor(flat, group.size(), group.group_name))
    return out.movedim(0, dim).contiguous()


def _scattered(full: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    flat = full.movedim(dim, 0).contiguous()
    ranks = group.size()
    assert flat.shape[0] % ranks == 0, (tuple(full.shape), dim, ranks)
    out: Tensor = functional.wait_tensor(functional.reduce_scatter_tensor(flat, "sum", ranks, group.group_name))
    moved = out.movedim(0, dim)
    if moved.is_contiguous():  # also of one sample; not known as a view, since a model may add to it in place (Falcon)
        unnamed: Tensor = torch.ops.aten._unsafe_view(out, moved.shape)
        return unnamed
    return moved.contiguous()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(part, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grads[0], ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _scattered(full, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grads[0], ctx.group, ctx.dim), None, None
