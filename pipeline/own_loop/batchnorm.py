"""Synchronized BatchNorm: statistics over the samples of all ranks, equal to one process with the whole batch.

torch.nn.SyncBatchNorm supports fp32 weights on GPUs, and refuses CPU tensors. This module covers the other cases, and
half-precision weights with fp32 statistics, which torch's does not support.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def synchronize_batchnorm(model: nn.Module, group: dist.ProcessGroup | None, *, half: bool) -> None:
    """Replaces every BatchNorm by a synchronized one, in place. Parameters and buffers stay the same objects.

    Args:
        model: searched for BatchNorm modules.
        group: ranks whose samples make up one batch; None for one rank.
        half: weights will be in half precision.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                setattr(parent, name, _synchronized(child, group, half=half))


def _synchronized(norm: _BatchNorm, group: dist.ProcessGroup | None, *, half: bool) -> nn.Module:
    on_cpu = all(tensor.device.type == "cpu" for tensor in (*norm.parameters(), *norm.buffers()))
    if on_cpu or half:
        return SyncedBatchNorm(norm, group)
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(norm, group)
    return converted


class SyncedBatchNorm(_BatchNorm):
    """BatchNorm over a group of ranks. Statistics are computed in fp32, in two passes: mean, then variance.

    Input and output [B, C, ...]. In evaluation mode it equals the BatchNorm it replaces. Source: Ioffe and Szegedy
    2015, Batch Normalization (arXiv:1502.03167), algorithm 1.

    Args:
        norm: the module it replaces; its parameters and buffers are shared.
        group: the ranks.
    """

    def __init__(self, norm: _BatchNorm, group: dist.ProcessGroup | None) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=False)
        self.affine, self.track_running_stats = norm.affine, norm.track_running_stats
        self._parameters.update(norm._parameters)
        self._buffers.update(norm._buffers)
        self._group = group
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Normalizes the input over all ranks' samples."""
        assert input.ndim >= 2, input.shape
        dims, shape = [0, *range(2, input.ndim)], (1, -1, *(1,) * (input.ndim - 2))
        values = input.float()
        if self.training or self.running_mean is None or self.running_var is None:
            count = _sum(values.new_tensor(values.numel() // values.shape[1]), self._group)
            mean = _sum(values.sum(dims), self._group) / count
            centered = values - mean.view(shape)
            variance = _sum(centered.square().sum(dims), self._group) / count
            if self.training:
                self._update_running_statistics(mean.detach(), variance.detach() * (count / (count - 1)))
        else:
            centered, variance = values - self.running_mean.float().view(shape), self.running_var.float()
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.float().view(shape) + self.bias.float().view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


def _sum(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return part
    total: Tensor = _AllReduce.apply(part, group)
    return total


class _AllReduce(torch.autograd.Function):
    """Differentiable all-reduce. Every rank's loss depends on the sum, so its gradient is summed over ranks, too."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
