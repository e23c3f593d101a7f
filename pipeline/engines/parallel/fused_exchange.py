"""Expert parallelism with kernels (DeepEP) that send rows, and sum a token's rows on each rank before returning them.

`RowKernels` is the interface of a kernel package; `fused_kernels` lists the packages. A kernel's handle is its record
of a routing: the backward pass of each kernel is the other kernel, with the handle of the forward pass. The order of an
expert's rows may vary between dispatches, and activation checkpointing computes the rows again. So the tensors of a
handle are stored like activations, and the backward pass uses the handle of the dispatch that sent its rows.

There are two differences from `AllToAll`. Weights are sent with the rows and multiply them on the expert's rank. A
token's rows are added up on each rank first, rounded to the kernels' dtype, and then over the ranks.

Shapes: as in `experts`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engines.parallel.experts import ExpertExchange

Handle = tuple[Any, ...]
"""A kernel's record of a routing: tensors and other values that depend only on the routing."""


class RowKernels(Protocol):
    """Kernels that exchange rows between the ranks of a group, for layers of equal sizes.

    Attributes:
        dtype: dtype of rows; weights are in fp32.
    """

    dtype: torch.dtype

    def dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Handle]:
        """Sends tokens [N, D], with experts int64 [N, K] and weights [N, K]; returns the rows of this rank's experts.

        Returns:
            Rows [M, D] sorted by expert, their weights [M], rows per expert int64 [L] on the device, and a handle.
        """
        ...

    def dispatch_again(self, hidden: Tensor, handle: Handle, *, rows: int) -> Tensor:
        """Sends other values [N, D] of the same tokens; returns rows [M, D] in the order of the handle's dispatch."""
        ...

    def combine(self, rows: Tensor, weights: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """Returns sums of rows [M, D] over each token's rows [N, D]; weights [M], if given, return as [N, K]."""
        ...


class FusedExchange(ExpertExchange):
    """Exchange by kernels.

    Args:
        name: name of the module of experts, for messages.
        group: the ep ranks.
        experts: E.
        kernels: kernels for these ranks and experts.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, *, experts: int, kernels: RowKernels) -> None:
        super().__init__(name, group, experts=experts)
        self._kernels = kernels

    def dispatch(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Implements `ExpertExchange.dispatch`."""
        hidden = hidden.to(self._kernels.dtype).contiguous()
        rows, here, counts, handle = _Dispatch.apply(hidden, chosen, weights.float().contiguous(), self._kernels)
        return self.received(rows), counts, (here, handle)

    def combine(self, rows: Tensor, dispatched: Any) -> Tensor:
        """Implements `ExpertExchange.combine`."""
        weights, handle = dispatched
        rows = (rows * weights.unsqueeze(1)).to(self._kernels.dtype)
        combined: Tensor = _Combine.apply(rows, handle, self._kernels)
        return combined


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, kernels: RowKernels) -> tuple[Any, ...]:
        rows, here, counts, handle = kernels.dispatch(hidden, chosen, weights)
        ctx.kernels = kernels
        _keep(ctx, handle)
        ctx.mark_non_differentiable(counts)
        return rows, here, counts, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, Tensor | None, None]:
        hidden, weights = ctx.kernels.combine(grads[0].contiguous(), grads[1].contiguous(), _kept(ctx))
        return hidden, None, weights, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Handle, kernels: RowKernels) -> Tensor:
        ctx.kernels, ctx.rows = kernels, len(rows)
        _keep(ctx, handle)
        return kernels.combine(rows, None, handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows = ctx.kernels.dispatch_again(grads[0].contiguous(), _kept(ctx), rows=ctx.rows)
        return rows, None, None


def _keep(ctx: Any, handle: Handle) -> None:
    """Stores a handle for the backward pass; its tensors are stored as activations, which a recomputation replaces."""
    ctx.save_for_backward(*(part for part in handle if isinstance(part, Tensor)))
    ctx.handle = tuple(_TENSOR if isinstance(part, Tensor) else part for part in handle)


def _kept(ctx: Any) -> Handle:
    tensors = iter(ctx.saved_tensors)
    return tuple(next(tensors) if part is _TENSOR else part for part in ctx.handle)


_TENSOR = object()
"""Placeholder for a tensor in a handle."""
