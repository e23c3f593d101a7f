"""Ring attention (context parallelism): keys and values are passed from rank to rank while queries stay.

Each rank attends to the keys of one rank at a time and merges the outputs by their log-sum-exp; attention sinks join
after the last block. So no rank ever has the keys of the full sequence, and there may be more ranks than heads. In the
backward pass, keys circulate once more together with their gradients. Source: Liu et al. 2023 (arXiv:2310.01889);
merging as Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3.1.

Rank r of c has chunks r and 2c - 1 - r of the 2c chunks of a sequence (zigzag, `topology.sequence_chunks`). Its own
keys are one causal block. For the keys of an earlier rank, all its queries attend to the first chunk and none to the
second. For the keys of a later rank, its second chunk of queries attends to both chunks, its first to none. So every
rank computes (T^2 + T) / 2 + (c - 1) T^2 / 2 pairs, the mean of the causal mask; other ranks' blocks are not masked.

While a block is computed, the next keys are being sent; in the backward pass, also the gradients of the previous block.

Shapes: B samples, H heads, K key/value heads, T positions of this rank, d head size, e head size of values. Keys and
values circulate as one tensor [B, K, T, d + e].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.topology import sequence_chunks
from pipeline.engines.parallel.kernels import attention_backward, attention_forward
from pipeline.models.attention_logits import LogitWatch
from pipeline.models.attention_scores import ScoreRule, sink_gradient, with_sinks
from pipeline.models.masks import CAUSAL, FULL, AttentionMask, make_part_mask


@dataclass(frozen=True)
class RingMask:
    """The masks of a rank for each hop of the keys.

    Attributes:
        hops: hop -> mask of its block of queries and keys; None if no query attends to any key.
    """

    hops: tuple[AttentionMask | None, ...]


@dataclass(frozen=True)
class _Block:
    """The queries of this rank that attend to keys of a source rank at a hop, and these keys.

    Attributes:
        source: rank that owns the keys.
        queries: range of this rank's T positions.
        keys: range of the source's T positions.
    """

    source: int
    queries: slice
    keys: slice


def _block(hop: int, *, rank: int, ranks: int, length: int) -> _Block:
    """Returns the block of a hop, for `length` positions on each rank."""
    source, half, whole = (rank - hop) % ranks, length // 2, slice(0, length)
    if source == rank:
        return _Block(source, whole, whole)
    return _Block(source, whole, slice(0, half)) if source < rank else _Block(source, slice(half, length), whole)


class RingAttention:
    """Ring attention: every rank computes all heads for its own positions. Implements `ContextParallelAttention`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def make_mask(
        self,
        documents: Tensor | None,
        window: int | None,
        *,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> RingMask:
        """Implements `ContextParallelAttention.make_mask`."""
        ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        return _mask_of_rank(documents, window, rank=rank, ranks=ranks, length=length, dtype=dtype, device=device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # messages between two ranks cannot be part of a graph
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: RingMask,
        rule: ScoreRule | None = None,
        watch: LogitWatch | None = None,
    ) -> Tensor:
        """Implements `ContextParallelAttention.attend`."""
        sinks = None if rule is None else rule.sinks
        ring = _Ring(dist.get_rank(self._group), dist.get_world_size(self._group), mask, scale, rule, watch)
        attended: Tensor = _RingFunction.apply(query, key, value, sinks, ring, self._group)
        return attended


class RingInOneProcess:
    """Ring attention of several ranks in one process, one after another, for the trial of an architecture.

    Queries, keys and values cover the whole sequence, in its order. Not differentiable.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def make_mask(self, documents: Tensor | None, window: int | None, **options: Any) -> tuple[RingMask, ...]:
        """Makes the masks of every rank, as `ContextParallelAttention.make_mask` does for one."""
        ranks = self._ranks
        return tuple(_mask_of_rank(documents, window, rank=rank, ranks=ranks, **options) for rank in range(ranks))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: tuple[RingMask, ...],
        rule: ScoreRule | None = None,
        watch: LogitWatch | None = None,
    ) -> Tensor:
        """Implements `ContextParallelAttention.attend`."""
        assert watch is None, "logits are watched in training alone"
        attended, length = query.new_empty(*query.shape[:3], value.shape[-1]), query.shape[2]
        key_value = torch.cat([key, value], -1)
        of_ranks = [
            torch.tensor([p for r in sequence_chunks(length, cp=self._ranks, cp_rank=each, zigzag=True) for p in r])
            for each in range(self._ranks)
        ]
        for rank, own in enumerate(of_ranks):
            arriving = (key_value[:, :, of_ranks[(rank - hop) % self._ranks]] for hop in range(self._ranks))
            ring = _Ring(rank, self._ranks, mask[rank], scale, rule)
            attended[:, :, own] = ring.forward(query[:, :, own], arriving)[0].to(query.dtype)
        return attended


def _mask_of_rank(
    documents: Tensor | None,
    window: int | None,
    *,
    rank: int,
    ranks: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> RingMask:
    if documents is None and (window is None or window >= length):
        return RingMask((CAUSAL,) + (FULL,) * (ranks - 1))
    chunks = [sequence_chunks(length, cp=ranks, cp_rank=each, zigzag=True) for each in range(ranks)]
    masks = []
    for hop in range(ranks):
        block = _block(hop, rank=rank, ranks=ranks, length=length // ranks)
        queries, keys = _chosen(chunks[rank], block.queries), _chosen(chunks[block.source], block.keys)
        masks.append(make_part_mask(documents, window, queries=queries, keys=keys, dtype=dtype, device=device))
    return RingMask(tuple(masks))


def _chosen(chunks: tuple[range, ...], part: slice) -> tuple[range, ...]:
    """Returns the chunks in a part of a rank's positions: both, the first or the second."""
    size = len(chunks[0])
    return chunks[part.start // size : part.stop // size]


def _positions(rank: int, part: slice, *, ranks: int, length: int) -> tuple[range, ...]:
    """Returns the chunks of the sequence in a part of a rank's `length` positions."""
    return _chosen(sequence_chunks(length * ranks, cp=ranks, cp_rank=rank, zigzag=True), part)


@dataclass(frozen=True)
class _Ring:
    """Ring attention as computed on one rank.

    Attributes:
        rank: index of this rank among `ranks`.
        ranks: number of ranks that share the sequence.
        mask: this rank's masks.
        scale: factor on the scores.
        rule: change of the scores, for all heads and positions; None for none.
        watch: watch that records the largest logits of every hop; None to record none.
    """

    rank: int
    ranks: int
    mask: RingMask
    scale: float
    rule: ScoreRule | None = None
    watch: LogitWatch | None = None

    def block_rule(self, block: _Block, query: Tensor) -> ScoreRule | None:
        """Returns the rule for the keys of a block."""
        if self.rule is None or self.rule.bias is None:
            return self.rule
        chunks = _positions(block.source, block.keys, ranks=self.ranks, length=query.shape[2])
        return self.rule.of_keys(torch.cat([torch.arange(c.start, c.stop, device=query.device) for c in chunks]))

    def blocks(self, arriving: Iterable[Tensor], length: int) -> Iterator[tuple[_Block, AttentionMask | None, Tensor]]:
        """Yields every hop's block, its mask, and the keys with their values [B, K, T, d + e] of the block's source."""
        for hop, key_value in enumerate(arriving):
            yield _block(hop, rank=self.rank, ranks=self.ranks, length=length), self.mask.hops[hop], key_value

    def forward(self, query: Tensor, arriving: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Computes output [B, H, T, e] and log-sum-exp over the keys of all hops and the sinks, in fp32."""
        out, log_sum = query.new_empty(0), query.new_empty(0)
        for block, allowed, key_value in self.blocks(arriving, query.shape[2]):
            if allowed is None:
                continue
            k, v = _keys_and_values(key_value, block, query)
            if self.watch is not None:
                _watch_block(self.watch, query, k, block, rank=self.rank, ranks=self.ranks)
            rule = self.block_rule(block, query)
            part = attention_forward(query[:, :, block.queries], k, v, scale=self.scale, mask=allowed, rule=rule)
            if not out.numel():  # first hop: every query attends to itself, so its log-sum-exp is finite from here on
                # copies: selective activation checkpointing stores the kernel's outputs, which must not change
                out, log_sum = part[0].to(torch.float32, copy=True), part[1].clone()
            else:
                _merge(out[:, :, block.queries], log_sum[:, :, block.queries], part[0].float(), part[1])
        if self.rule is not None and self.rule.sinks is not None:
            out = with_sinks(out, log_sum, self.rule)
            log_sum = torch.logaddexp(log_sum, self.rule.sinks.float()[:, None])
        return out, log_sum


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _sinks: Tensor | None,
        ring: _Ring,
        group: dist.ProcessGroup,
    ) -> Tensor:
        out, log_sum = ring.forward(query, _circulating(torch.cat([key, value], -1), group))
        attended = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, attended, log_sum)
        ctx.ring, ctx.group = ring, group
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, out, log_sum = ctx.saved_tensors
        ring, group = ctx.ring, ctx.group
        d_query = torch.zeros_like(query, dtype=torch.float32)
        returning: _RingTransfer | None = None
        arriving = _circulating(torch.cat([key, value], -1), group)
        for block, allowed, key_value in ring.blocks(arriving, query.shape[2]):
            parts = None
            if allowed is not None:
                own = (each[:, :, block.queries] for each in (grads[0], query, out, log_sum))
                grad, q, o, s = own
                k, v = _keys_and_values(key_value, block, query)
                rule = ring.block_rule(block, query)
                parts = attention_backward(grad, q, k, v, o, s, scale=ring.scale, mask=allowed, rule=rule)
            # the gradients of these keys arrive while their block is computed; they make one hop more than the keys,
            # and so return to the keys' own rank
            d_key_value = returning.wait() if returning else torch.zeros_like(key_value, dtype=torch.float32)
            if parts is not None:
                d_query[:, :, block.queries] += parts[0]
                d_key, d_value = _keys_and_values(d_key_value, block, query)
                d_key += parts[1]
                d_value += parts[2]
            returning = _RingTransfer(d_key_value, group)
        assert returning is not None
        d_key, d_value = returning.wait().to(key.dtype).split([key.shape[-1], value.shape[-1]], -1)
        sinks = None if ring.rule is None else ring.rule.sinks
        d_sinks = None if sinks is None else sink_gradient(grads[0], out, log_sum, sinks)
        return d_query.to(query.dtype), d_key, d_value, d_sinks, None, None


def _keys_and_values(key_value: Tensor, block: _Block, query: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a block's keys, with the queries' head size, and of its values."""
    part, size = key_value[:, :, block.keys], query.shape[-1]
    return part[..., :size], part[..., size:]


def _circulating(tensor: Tensor, group: dist.ProcessGroup) -> Iterator[Tensor]:
    """Yields the tensor of this rank, of the previous rank, and so on; receives the next while one is in use."""
    for left in reversed(range(dist.get_world_size(group))):
        transfer = _RingTransfer(tensor, group) if left else None
        yield tensor
        tensor = transfer.wait() if transfer else tensor


def _watch_block(watch: LogitWatch, query: Tensor, key: Tensor, block: _Block, *, rank: int, ranks: int) -> None:
    """Watches the logits of a hop: the products of this rank's queries and the block's keys."""
    of_rank = partial(_positions, ranks=ranks, length=query.shape[2])
    queries, keys = of_rank(rank, block.queries), of_rank(block.source, block.keys)
    watch.see(query[:, :, block.queries], key, queries=queries, keys=keys)


class _RingTransfer:
    """Asynchronous transfer that sends a tensor to the next rank and receives the previous rank's."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        following, previous = (rank + 1) % ranks, (rank - 1) % ranks
        send = dist.P2POp(dist.isend, self._sent, group=group, group_peer=following)
        receive = dist.P2POp(dist.irecv, self._received, group=group, group_peer=previous)
        # with two ranks both messages have the same pair of ranks: every rank must list the send first
        self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Waits for both transfers; returns the tensor of the previous rank."""
        for work in self._works:
            work.wait()
        return self._received


def _merge(out: Tensor, log_sum: Tensor, part_out: Tensor, part_log_sum: Tensor) -> None:
    """Merges attention over a second set of keys into attention over a first set, in place.

    Args:
        out, log_sum: output [B, H, T, e] and (finite) log-sum-exp [B, H, T] over the first set, fp32.
        part_out, part_log_sum: output and log-sum-exp over the second set; without keys, minus infinity.
    """
    both = torch.logaddexp(log_sum, part_log_sum)
    out.mul_((log_sum - both).exp().unsqueeze(-1)).add_(part_out * (part_log_sum - both).exp().unsqueeze(-1))
    log_sum.copy_(both)
