"""Context parallelism: every rank holds a piece of the sequence, and attention still sees all of it.

Shapes: B samples, H heads, K key/value heads, T positions of this rank, S = cp T of the sequence, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.models.attention import Exchange, Mask, attend, repeat_heads
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.ring import Ring


def make_exchange(kind: str, mesh: Mesh) -> Exchange | None:
    """The exchange of a layout; None without context parallelism."""
    group = mesh.group("cp")
    if group is None:
        return None
    return Ring(group) if kind == "ring" else Ulysses(group)


class Ulysses:
    """Every rank attends with some of the heads over the whole sequence.

    An all-to-all turns pieces of the sequence with all heads into the whole sequence with some heads, and back. Key
    and value heads are repeated, as few times as will do, where the ranks do not divide them. Source: Jacobs et al.
    2023 (arXiv:2309.14509).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Mask) -> Tensor:
        """See `Exchange.attend`."""
        times = _times(query.shape[1], key.shape[1], ranks=dist.get_world_size(self._group))
        if times > 1:
            key, value = repeat_heads(key, times), repeat_heads(value, times)
        query, key, value = (swap(each, self._group, cut=1, join=2) for each in (query, key, value))
        return swap(attend(query, key, value, scale=scale, mask=mask), self._group, cut=2, join=1)


def _times(heads: int, groups: int, *, ranks: int) -> int:
    """How often key/value heads are repeated, so that every rank gets those its query heads need."""
    return next(n for n in range(1, heads // groups + 1) if heads % (groups * n) == 0 and groups * n % ranks == 0)


def swap(tensor: Tensor, group: dist.ProcessGroup, *, cut: int, join: int) -> Tensor:
    """Cuts a tensor along one dim, sends piece i to rank i, and joins what arrives along another. Differentiable."""
    swapped: Tensor = _Swap.apply(tensor, group, cut, join)
    return swapped


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _swapped(tensor, group, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _swapped(grads[0], ctx.group, ctx.join, ctx.cut), None, None, None


def _swapped(tensor: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    pieces = torch.stack(tensor.chunk(dist.get_world_size(group), dim=cut))
    arrived = torch.empty_like(pieces)
    dist.all_to_all_single(arrived, pieces.contiguous(), group=group)
    return torch.cat(arrived.unbind(), dim=join)
