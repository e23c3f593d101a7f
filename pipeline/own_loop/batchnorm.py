"""BatchNorm over the samples of all ranks, as one process with the whole batch would compute it.

torch.nn.SyncBatchNorm does that for fp32 weights on GPUs, and refuses tensors on the CPU. Elsewhere this module does.
It also takes weights in half precision beside statistics in fp32, which torch's do not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def synchronise(model: nn.Module, group: dist.ProcessGroup | None, *, half: bool) -> None:
    """Replaces every BatchNorm in place. Parameters and buffers stay the same objects.

    Args:
        model: is searched.
        group: ranks whose samples make one batch; None for one rank.
        half: the weights will be in half precision.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                setattr(parent, name, _replaced(child, group, half=half))


def _replaced(norm: _BatchNorm, group: dist.ProcessGroup | None, *, half: bool) -> nn.Module:
    on_cpu = all(tensor.device.type == "cpu" for tensor in (*norm.parameters(), *norm.buffers()))
    if on_cpu or half:
        return SyncedBatchNorm(norm, group)
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(norm, group)
    return converted


class SyncedBatchNorm(_BatchNorm):
    """BatchNorm over a group of ranks. Statistics are computed in fp32, in two passes: mean, then squares around it.

    Input and output [B, C, ...]. In evaluation it is the BatchNorm that it was made from. Source: Ioffe and Szegedy
    2015, Batch Normalization (arXiv:1502.03167), algorithm 1.

    Args:
        norm: what it replaces; its parameters and buffers are taken over.
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
        """See the class."""
        assert input.ndim >= 2, input.shape
        dims, shape = [0, *range(2, input.ndim)], (1, -1, *(1,) * (input.ndim - 2))
        values = input.float()
        if self.training or self.running_mean is None or self.running_var is None:
            count = _sum(values.new_tensor(values.numel() // values.shape[1]), self._group)
            mean = _sum(values.sum(dims), self._group) / count
            centred = values - mean.view(shape)
            variance = _sum(centred.square().sum(dims), self._group) / count
            if self.training:
                self._remember(mean.detach(), variance.detach() * (count / (count - 1)))
        else:
            centred, variance = values - self.running_mean.float().view(shape), self.running_var.float()
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.float().view(shape) + self.bias.float().view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def _sum(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return part
    total: Tensor = _AllReduce.apply(part, group)
    return total


class _AllReduce(torch.autograd.Function):
    """A sum over ranks. Every rank's loss depends on the sum, so its gradient is the sum of the ranks' gradients."""

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
