"""Attention masks besides the causal one: documents packed into a sequence, and sliding windows.

They are made once per forward pass, before the layers, so that a layer changes nothing and can be compiled. On a GPU a
mask is a table of blocks for FlexAttention, of (S / 128)^2 entries, computed from the first and last document of every
block; blocks that nobody attends to are skipped. Elsewhere it is a tensor of S x S numbers per sample (128 MiB at
S = 8192 in bf16), since FlexAttention has no backward pass on a CPU.

Shapes: B samples, S positions of the full sequence, n = S / 128 blocks, rounded up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Positions of a block of FlexAttention's mask, for queries and keys: torch's default."""


@dataclass(frozen=True)
class AttentionMask:
    """The causal mask, and what it is combined with.

    Attributes:
        additive: [B or 1, 1, S, S] of the query's dtype: 0 where a query (row) attends to a key (column), else minus
            infinity. An additive mask, not a boolean one, which the kernels of scaled dot product attention would
            convert to an additive one in every layer.
        blocks: the same for FlexAttention. Both are None for the causal mask alone.
    """

    additive: Tensor | None = None
    blocks: BlockMask | None = None

    @property
    def causal_only(self) -> bool:
        """Whether the mask is the causal mask alone."""
        return self.additive is None and self.blocks is None


CAUSAL = AttentionMask()


def make_mask(
    documents: Tensor | None,
    window: int | None,
    *,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    blocks: bool | None = None,
) -> AttentionMask:
    """The mask of a micro-batch, for layers of one kind.

    Args:
        documents: [B, S], document index of every position of the full sequence; None for one document.
        window: positions that a query attends to, itself included; None for all. One not smaller than the sequence has
            no effect.
        length: S.
        dtype: of the queries.
        device: of the mask.
        blocks: for FlexAttention; on a GPU when None.
    """
    if window is not None and window >= length:
        window = None
    if documents is None and window is None:
        return CAUSAL
    if device.type == "cuda" if blocks is None else blocks:
        return AttentionMask(blocks=_block_mask(documents, window, length=length, device=device))
    allowed = _allowed(documents, window, length=length, device=device)
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return AttentionMask(additive=zeros.masked_fill_(~allowed, -math.inf))


def _allowed(documents: Tensor | None, window: int | None, *, length: int, device: torch.device) -> Tensor:
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    if documents is None:
        return allowed[None, None]
    return allowed & (documents[:, None, :, None] == documents[:, None, None, :])


def _block_mask(documents: Tensor | None, window: int | None, *, length: int, device: torch.device) -> BlockMask:
    """FlexAttention's table: which blocks are attended to in part, and which in full.

    A block of keys is needed where it is not after the block of queries, within the window, and their ranges of
    documents overlap; it is attended to in full where all its keys come before all queries, within the window of each,
    and both blocks are of one document. Nothing of size S x S is made.
    """
    blocks = -(-length // BLOCK)
    start = torch.arange(blocks, device=device) * BLOCK
    end = (start + BLOCK).clamp(max=length) - 1
    q_start, q_end, k_start, k_end = start[:, None], end[:, None], start[None, :], end[None, :]
    needed, full = k_start <= q_end, k_end <= q_start
    if window is not None:
        needed, full = needed & (q_start - k_end < window), full & (q_end - k_start < window)
    needed, full = needed[None, None], full[None, None]
    if documents is not None:
        low, high = _document_range(documents, blocks)
        q_low, q_high, k_low, k_high = (
            low[:, None, :, None],
            high[:, None, :, None],
            low[:, None, None],
            high[:, None, None],
        )
        needed = needed & (k_high >= q_low) & (q_high >= k_low)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    part = needed & ~full
    rule, lengths = _rule(documents, window), (length, length)
    return BlockMask.from_kv_blocks(
        *_listed(part), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=lengths
    )


def _document_range(documents: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest document of every block: [B, n] each."""
    missing = blocks * BLOCK - documents.shape[1]
    padded = torch.cat([documents, documents[:, -1:].expand(-1, missing)], dim=1) if missing else documents
    grouped = padded.view(documents.shape[0], blocks, BLOCK)
    return grouped.amin(-1), grouped.amax(-1)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are chosen for every block of queries, and their numbers, first; int32."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _rule(documents: Tensor | None, window: int | None) -> Any:
    """FlexAttention's `mask_mod`: whether a query attends to a key."""

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = query >= key
        return allowed if window is None else allowed & (query - key < window)

    def of_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert documents is not None
        return causal(batch, head, query, key) & (documents[batch, query] == documents[batch, key])

    return causal if documents is None else of_document
