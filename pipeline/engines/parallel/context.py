"""Context parallelism (Ulysses, ring attention): ranks hold shards of the sequence, and attention spans all of it.

Shapes: B samples, H heads, K key/value heads, T positions of this rank, S = cp T of the sequence, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engines.parallel.collectives import all_gather, functional
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.ring import RingAttention
from pipeline.models.attention import ContextParallelAttention, attend, repeat_heads
from pipeline.models.attention_logits import LogitWatch
from pipeline.models.attention_scores import ScoreRule
from pipeline.models.masks import AttentionMask, make_mask


def make_cp_attention(kind: str, mesh: Mesh) -> ContextParallelAttention | None:
    """Makes the attention across ranks of a layout; None without context parallelism.

    Args:
        kind: ulysses or ring.
        mesh: this rank's coordinates and groups.
    """
    group = mesh.group("cp")
    if group is None:
        return None
    return RingAttention(group) if kind == "ring" else UlyssesAttention(group)


class UlyssesAttention:
    """Ulysses: every rank computes the attention of some heads over the full sequence.

    An all-to-all turns sequence shards with all heads into the full sequence with some heads; another reverses it. If
    the number of ranks does not divide the key and value heads, these are repeated as few times as necessary. Source:
    Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).
    """

    make_mask = staticmethod(make_mask)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: AttentionMask,
        rule: ScoreRule | None = None,
        watch: LogitWatch | None = None,
    ) -> Tensor:
        """Implements `ContextParallelAttention.attend`."""
        times = _kv_repeats(query.shape[1], key.shape[1], ranks=dist.get_world_size(self._group))
        if times > 1:
            key, value = repeat_heads(key, times), repeat_heads(value, times)
        query, key, value = (all_to_all(each, self._group, scatter_dim=1, gather_dim=2) for each in (query, key, value))
        if watch is not None:
            whole, first = (range(query.shape[2]),), dist.get_rank(self._group) * key.shape[1]
            watch.see(query, key, queries=whole, keys=whole, first_head=first, copies=times)
        if rule is not None:
            first = dist.get_rank(self._group) * query.shape[1]
            rule = rule.of_heads(slice(first, first + query.shape[1]))
        attended = attend(query, key, value, scale=scale, mask=mask, rule=rule, flex=query.is_cuda)
        return all_to_all(attended, self._group, scatter_dim=2, gather_dim=1)

    def gathered(self, tensor: Tensor) -> Tensor:
        """Gathers a tensor of every rank's positions, [B, T, ...] -> [B, S, ...]. Not differentiable."""
        return all_gather(tensor.detach(), self._group, dim=1)


def _kv_repeats(heads: int, kv_heads: int, *, ranks: int) -> int:
    """Returns the number of copies of each key/value head with which every rank has the heads for its queries."""
    return next(n for n in range(1, heads // kv_heads + 1) if heads % (kv_heads * n) == 0 and kv_heads * n % ranks == 0)


def all_to_all(tensor: Tensor, group: dist.ProcessGroup, *, scatter_dim: int, gather_dim: int) -> Tensor:
    """Splits a tensor along `scatter_dim`, sends chunk i to rank i, concatenates received chunks along `gather_dim`.

    Differentiable: the backward pass swaps the two dims.
    """
    exchanged: Tensor = _UlyssesAllToAll.apply(tensor, group, scatter_dim, gather_dim)
    return exchanged


class _UlyssesAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int) -> Tensor:
        ctx.group, ctx.scatter_dim, ctx.gather_dim = group, scatter_dim, gather_dim
        return _exchanged(tensor, group, scatter_dim, gather_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.group, ctx.gather_dim, ctx.scatter_dim), None, None, None


def _exchanged(tensor: Tensor, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size(), dim=scatter_dim))
    equal = [1] * group.size()
    received = functional.wait_tensor(functional.all_to_all_single(sent, equal, equal, group.group_name))
    return torch.cat(received.unbind(), dim=gather_dim)
