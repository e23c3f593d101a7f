"""Ring attention (context parallelism): keys and values are passed from rank to rank while queries stay.

Each rank attends to one shard of the keys at a time and merges the outputs by their log-sum-exp, so that no rank ever
holds the keys of the full sequence, and there may be more ranks than heads. In the backward pass, keys circulate once
more together with their gradients. Source: Liu et al. 2023 (arXiv:2310.01889); merging as Milakov and Gimelshein 2018
(arXiv:1805.02867), section 3.1.

Shards are contiguous: rank r attends to r + 1 shards, so that the last rank does twice the average work, and the others
wait. Only the causal mask is supported; windows and document masks need `UlyssesAttention`.

Shapes: B samples, H heads, K key/value heads, T positions of this rank, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.models.attention import repeat_heads
from pipeline.models.masks import AttentionMask
from pipeline.parallel.kernels import attention_backward, attention_forward


class RingAttention:
    """Every rank computes all heads for its own positions. See `models.attention.ContextParallelAttention`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # messages between two ranks cannot be part of a graph
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: AttentionMask) -> Tensor:
        """See `ContextParallelAttention.attend`."""
        assert mask.causal_only, "refused by the checks: ring attention supports only the causal mask"
        attended: Tensor = _RingFunction.apply(query, key, value, scale, self._group)
        return attended


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        times = query.shape[1] // key.shape[1]
        key_value = torch.stack([key, value])
        out = log_sum = None
        for hop in range(ranks):
            transfer = _RingTransfer(key_value, group) if hop < ranks - 1 else None
            if hop <= rank:  # the shard of rank - hop; the causal mask hides later shards
                k, v = (repeat_heads(each, times) for each in key_value)
                shard_out, shard_log_sum = attention_forward(query, k, v, scale=scale, causal=hop == 0)
                out, log_sum = _merge(out, log_sum, shard_out.float(), shard_log_sum)
            key_value = transfer.wait() if transfer else key_value
        assert out is not None
        assert log_sum is not None
        attended = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, attended, log_sum)
        ctx.scale, ctx.group = scale, group
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, log_sum = ctx.saved_tensors
        group, ranks, rank = ctx.group, dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        times = query.shape[1] // key.shape[1]
        d_query = torch.zeros_like(query, dtype=torch.float32)
        key_value = torch.stack([key, value])
        d_key_value = torch.zeros_like(key_value, dtype=torch.float32)
        for hop in range(ranks):
            transfer = _RingTransfer(key_value, group) if hop < ranks - 1 else None
            if hop <= rank:
                k, v = (repeat_heads(each, times) for each in key_value)
                parts = attention_backward(grads[0], query, k, v, out, log_sum, scale=ctx.scale, causal=hop == 0)
                d_query += parts[0]
                d_key_value += torch.stack([_sum_repeated_heads(each, times) for each in parts[1:]])
            # the gradients make one hop more than their keys, and so return to the rank that owns them
            d_key_value = _RingTransfer(d_key_value, group).wait()
            key_value = transfer.wait() if transfer else key_value
        d_key, d_value = d_key_value.to(key.dtype)
        return d_query.to(query.dtype), d_key, d_value, None, None


class _RingTransfer:
    """Asynchronous transfer of a tensor to the next rank, while that of the previous rank is received."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        following, previous = (rank + 1) % ranks, (rank - 1) % ranks
        send = dist.P2POp(dist.isend, self._sent, group=group, group_peer=following)
        receive = dist.P2POp(dist.irecv, self._received, group=group, group_peer=previous)
        # with two ranks both messages are between the same pair: every rank must list the send first
        self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Waits for both transfers; returns the tensor of the previous rank."""
        for work in self._works:
            work.wait()
        return self._received


def _merge(
    out: Tensor | None, log_sum: Tensor | None, shard_out: Tensor, shard_log_sum: Tensor
) -> tuple[Tensor, Tensor]:
    """Merges attention over two sets of keys: outputs [B, H, T, d] and log-sum-exp [B, H, T]."""
    if out is None or log_sum is None:
        return shard_out, shard_log_sum
    both = torch.logaddexp(log_sum, shard_log_sum)
    weights = ((each - both).exp().unsqueeze(-1) for each in (log_sum, shard_log_sum))
    return out * next(weights) + shard_out * next(weights), both


def _sum_repeated_heads(gradient: Tensor, times: int) -> Tensor:
    """[B, K times, T, d] -> [B, K, T, d], fp32: sums over the copies of a head."""
    batch, heads, length, size = gradient.shape
    return gradient.float().reshape(batch, heads // times, times, length, size).sum(2)
