"""Ring attention: keys and values travel from rank to rank while every rank's queries stay.

Each rank attends to one piece of the keys at a time and merges the pieces' outputs by their log-sum-exp, so that no
rank ever holds the keys of the whole sequence, and there may be more ranks than heads. Backward, keys go round once
more and their gradients travel with them. Source: Liu et al. 2023 (arXiv:2310.01889); merging as Milakov and
Gimelshein 2018 (arXiv:1805.02867), section 3.1.

Pieces are contiguous: rank r attends to r + 1 pieces, so that the last rank works twice the average, and the others
wait. Only the causal mask is known; windows and documents need `Ulysses`.

Shapes: B samples, H heads, K key/value heads, T positions of this rank, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.models.attention import Mask, repeat_heads
from pipeline.parallel.kernels import attention_backward, attention_forward


class Ring:
    """Every rank attends with all heads and its own positions. See `models.attention.Exchange`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Mask) -> Tensor:
        """See `Exchange.attend`."""
        assert mask.causal, "refused by the checks: ring attention knows only the causal mask"
        attended: Tensor = _Ring.apply(query, key, value, scale, self._group)
        return attended


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        times = query.shape[1] // key.shape[1]
        pair = torch.stack([key, value])
        out = log_sum = None
        for turn in range(ranks):
            passing = _Passing(pair, group) if turn < ranks - 1 else None
            if turn <= rank:  # the piece of rank - turn; later pieces are not seen
                k, v = (repeat_heads(each, times) for each in pair)
                piece, piece_sum = attention_forward(query, k, v, scale=scale, causal=turn == 0)
                out, log_sum = _merged(out, log_sum, piece.float(), piece_sum)
            pair = passing.arrived() if passing else pair
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
        of_query = torch.zeros_like(query, dtype=torch.float32)
        pair = torch.stack([key, value])
        of_pair = torch.zeros_like(pair, dtype=torch.float32)
        for turn in range(ranks):
            passing = _Passing(pair, group) if turn < ranks - 1 else None
            if turn <= rank:
                k, v = (repeat_heads(each, times) for each in pair)
                parts = attention_backward(grads[0], query, k, v, out, log_sum, scale=ctx.scale, causal=turn == 0)
                of_query += parts[0]
                of_pair += torch.stack([_grouped(each, times) for each in parts[1:]])
            # the gradients go one step further than the keys they belong to, and so come home
            of_pair = _Passing(of_pair, group).arrived()
            pair = passing.arrived() if passing else pair
        of_key, of_value = of_pair.to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None


class _Passing:
    """A tensor on its way to the next rank, while the same of the rank before arrives."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._sent, self._arriving = (
            tensor.contiguous(),
            torch.empty_like(tensor, memory_format=torch.contiguous_format),
        )
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        send = dist.P2POp(dist.isend, self._sent, group=group, group_peer=after)
        receive = dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=before)
        # with two ranks both messages have one pair of ends: everyone names sending first
        self._works = dist.batch_isend_irecv([send, receive])

    def arrived(self) -> Tensor:
        """Waits; the tensor of the rank before."""
        for work in self._works:
            work.wait()
        return self._arriving


def _merged(out: Tensor | None, log_sum: Tensor | None, piece: Tensor, piece_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from that over each: outputs [B, H, T, d] and log-sum-exp [B, H, T]."""
    if out is None or log_sum is None:
        return piece, piece_sum
    both = torch.logaddexp(log_sum, piece_sum)
    weights = ((each - both).exp().unsqueeze(-1) for each in (log_sum, piece_sum))
    return out * next(weights) + piece * next(weights), both


def _grouped(gradient: Tensor, times: int) -> Tensor:
    """[B, K times, T, d] -> [B, K, T, d], fp32: the copies of a head add up."""
    batch, heads, length, size = gradient.shape
    return gradient.float().reshape(batch, heads // times, times, length, size).sum(2)
