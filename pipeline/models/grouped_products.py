"""Grouped matrix products of stacked experts, with gradients that are exactly 0 for experts that got no rows.

On Blackwell, torch's `grouped_mm` (2.13) does not write the gradient of an expert without rows, which is then whatever
was in that memory (pytorch/pytorch#172439); Hopper's kernel and those of CPUs write zeros. So products of
`parallel.experts` set these gradients here, and on Blackwell a model whose experts transformers computes gets
`zero_idle_experts`.

Shapes: M rows of L experts with weights [L, O, I], or [L, I, O] where transposed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

_NAME, _TRANSFORMERS = "headrace_grouped_mm", "grouped_mm"
"""Values of `_experts_implementation`: ours, and transformers' default."""

_BLACKWELL = (10, 0)


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Multiplies every row by its expert's matrix, in the dtype of both. Differentiable.

    Args:
        rows: [M, I], sorted by expert.
        weight: [L, O, I], or [L, I, O] where `transposed`.
        ends: int32 [L], index of the first row after each expert's rows.
        transposed: whether the inputs are the weight's second dim.

    Returns:
        [M, O].
    """
    product: Tensor = _ExactProduct.apply(rows, weight, ends, transposed)
    return product


class _ExactProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.transposed = transposed
        return _multiplied(rows, weight if transposed else weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient, to_rows, to_weight = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            to_rows = _multiplied(gradient, weight.mT if ctx.transposed else weight, ends)
        if ctx.needs_input_grad[1]:
            to_weight = weight_gradient(rows, gradient, ends, ctx.transposed)
        return to_rows, to_weight, None, None


def _multiplied(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiplies rows [M, I] by matrices [L, I, O]; a rank may get no rows, for which no kernel is launched."""
    return F.grouped_mm(rows, matrices, offs=ends) if len(rows) else rows.new_empty(0, matrices.shape[-1])


def weight_gradient(rows: Tensor, gradient: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Computes the gradient of the weights from rows [M, I] and the outputs' gradient [M, O]; see `grouped_product`."""
    left, right = (rows, gradient) if transposed else (gradient, rows)
    if not len(rows):
        return rows.new_zeros(len(ends), left.shape[1], right.shape[1])
    found = F.grouped_mm(left.mT, right, offs=ends)
    if leaves_idle_experts(rows.device):
        found.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
    return found


def leaves_idle_experts(device: torch.device) -> bool:
    """Whether gradients of experts without rows have to be set. True on a CPU, too, where tests need it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _BLACKWELL


def zero_idle_experts(model: nn.Module) -> None:
    """Makes the experts that transformers computes by `grouped_mm` have exact gradients, in place, on any device."""
    module: Any
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel") and module.config._experts_implementation == _TRANSFORMERS:
            module.config = copy.copy(module.config)
            module.config._experts_implementation = _NAME


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    busy = torch.zeros(module.num_experts, dtype=torch.bool, device=top_k_index.device)
    experts: Any = _ExactGradients(module, ~busy.scatter(0, top_k_index.reshape(-1), True))
    output: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return output


ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)


class _ExactGradients:
    """A module of experts as transformers' function reads it; the gradients of its stacked weights are exact."""

    def __init__(self, module: Any, idle: Tensor) -> None:
        self._module, self._idle = module, idle

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _ZeroIdle.apply(found, self._idle) if isinstance(found, Tensor) and found.ndim == 3 else found


class _ZeroIdle(torch.autograd.Function):
    """Returns stacked weights [L, ...] unchanged; sets the gradients of idle experts, bool [L], to 0."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, idle: Tensor) -> Tensor:
        ctx.save_for_backward(idle)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (idle,) = ctx.saved_tensors
        return grads[0].masked_fill(idle[:, None, None], 0), None
