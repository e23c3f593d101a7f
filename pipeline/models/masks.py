"""Attention masks besides the causal one: documents packed into a sequence, and sliding windows.

Masks are made once per forward pass, before the layers; layers do not change them and can be compiled. On a GPU a mask
is a table of blocks for FlexAttention with (S / 128)^2 entries, computed from the first and last document of every
block; blocks that no query attends to are skipped. On a CPU, where FlexAttention has no backward pass, a mask is a
tensor of S x S numbers per sample (128 MiB at S = 8192 in bf16).

Ring attention needs masks for a part of the queries and a part of the keys: `make_part_mask`.

Shapes: B samples, S positions of the full sequence, n = S / 128 blocks, rounded up; Q queries and K keys of a mask,
both S except in ring attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Positions of a block of FlexAttention's mask, for queries and keys: torch's default."""


@dataclass(frozen=True)
class AttentionMask:
    """The causal mask, alone or combined with a document mask and a sliding window.

    Attributes:
        additive: [B or 1, 1, Q, K], in the query's dtype: 0 where a query (row) attends to a key (column), else minus
            infinity. It is additive because sdpa kernels would convert a boolean mask in every layer.
        blocks: the same mask for FlexAttention. `additive` and `blocks` are both None for the causal mask alone.
        causal: whether a mask without `additive` and `blocks` is the causal mask; if not, every query attends to every
            key.
    """

    additive: Tensor | None = None
    blocks: BlockMask | None = None
    causal: bool = True

    @property
    def causal_only(self) -> bool:
        """Whether the mask is the causal mask alone."""
        return self.additive is None and self.blocks is None and self.causal


@dataclass(frozen=True)
class Chunks:
    """A layer whose queries attend to keys of their own chunk of a document (Llama 4), in place of a window.

    Attributes:
        size: positions of a chunk.
    """

    size: int


Span = int | Chunks | None
"""Span of a layer: positions of its sliding window, or its chunks; None for full attention."""


def split_span(
    documents: Tensor | None, span: Span, *, length: int, device: torch.device
) -> tuple[Tensor | None, int | None]:
    """Returns the documents and the window of a layer; every chunk of a document becomes a document.

    Args:
        documents: [B, S], document index of every position; None for one document.
        span: the layer's span.
        length: S.
        device: device of the documents.
    """
    if not isinstance(span, Chunks):
        return documents, span
    if documents is None and span.size >= length:
        return None, None
    whole = torch.zeros(1, length, dtype=torch.int32, device=device) if documents is None else documents
    starts = positions_in_documents(whole) % span.size == 0
    return starts.cumsum(1, dtype=torch.int32), None


CAUSAL = AttentionMask()
FULL = AttentionMask(causal=False)


def make_mask(
    documents: Tensor | None,
    window: int | None,
    *,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    blocks: bool | None = None,
) -> AttentionMask:
    """Makes the mask of a micro-batch, for layers with one window.

    Args:
        documents: [B, S], document index of every position of the full sequence; None for one document.
        window: positions that a query attends to, itself included; None for all. A window as long as the sequence has
            no effect.
        length: S.
        dtype: dtype of the queries.
        device: device of the mask.
        blocks: whether to make blocks for FlexAttention; on a GPU when None.
    """
    if window is not None and window >= length:
        window = None
    if documents is None and window is None:
        return CAUSAL
    whole = torch.arange(length, device=device)
    use_blocks = device.type == "cuda" if blocks is None else blocks
    if use_blocks:
        return AttentionMask(blocks=_block_mask(documents, window, whole, whole))
    return AttentionMask(additive=_additive(allowed_pairs(documents, window, whole, whole), dtype))


def with_blocks(mask: AttentionMask, *, queries: int, keys: int, device: torch.device) -> AttentionMask:
    """Returns a mask with blocks for FlexAttention instead of none; masks with a tensor unchanged.

    Args:
        mask: any mask.
        queries, keys: their numbers, which are equal for the causal mask.
        device: device of the blocks.
    """
    if mask.blocks is not None or mask.additive is not None:
        return mask
    return AttentionMask(blocks=_whole_blocks(queries, keys, mask.causal, device))


@cache
def _whole_blocks(queries: int, keys: int, causal: bool, device: torch.device) -> BlockMask:
    of_keys = torch.arange(keys, device=device)
    return _block_mask(None, None, of_keys if causal else torch.arange(queries, device=device) + keys, of_keys)


def make_decoding_mask(
    documents: Tensor | None,
    window: int | None,
    *,
    first: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionMask:
    """Makes the mask for decoding: queries from position `first` on attend to the keys of all positions.

    It is never a mask for FlexAttention, which would be compiled for every new length. The host waits for nothing.

    Args:
        documents: [B, length], document index of every position; None for one document.
        window: positions that a query attends to, itself included; None for all.
        first: first position that has a query.
        length: number of positions with keys; those from `first` on have queries, too.
        dtype: dtype of the queries.
        device: device of the mask.
    """
    narrow = window is not None and window < length
    if documents is None and not narrow and (first == 0 or first == length - 1):
        return CAUSAL if first == 0 else FULL
    keys = torch.arange(length, device=device)
    return AttentionMask(additive=_additive(allowed_pairs(documents, window, keys[first:], keys), dtype))


def make_part_mask(
    documents: Tensor | None,
    window: int | None,
    *,
    queries: Sequence[range],
    keys: Sequence[range],
    dtype: torch.dtype,
    device: torch.device,
    blocks: bool | None = None,
) -> AttentionMask | None:
    """Makes the mask of some queries and some keys of a sequence, for a rank of ring attention.

    Args:
        documents: [B, S], document index of every position; None for one document.
        window: positions that a query attends to, itself included; None for all.
        queries: positions of the queries, as chunks of the sequence in ascending order.
        keys: positions of the keys, as chunks in ascending order.
        dtype: dtype of the queries.
        device: device of the mask.
        blocks: whether to make blocks for FlexAttention; on a GPU when None.

    Returns:
        The mask; None if no query attends to any key. On a GPU only the window is considered, since reading the
        document indices would make the host wait; FlexAttention skips the blocks.
    """
    if queries[-1][-1] < keys[0][0] or (window is not None and queries[0][0] - keys[-1][-1] >= window):
        return None
    q_positions, k_positions = (
        torch.cat([torch.arange(r.start, r.stop, device=device) for r in each]) for each in (queries, keys)
    )
    if device.type == "cuda" if blocks is None else blocks:
        return AttentionMask(blocks=_block_mask(documents, window, q_positions, k_positions))
    allowed = allowed_pairs(documents, window, q_positions, k_positions)
    if bool(allowed.all()):
        return FULL
    return AttentionMask(additive=_additive(allowed, dtype)) if bool(allowed.any()) else None


def make_selected_mask(indices: Tensor, documents: Tensor | None, *, length: int, dtype: torch.dtype) -> AttentionMask:
    """Makes the mask of a layer whose indexer has selected keys; it is always a tensor.

    Args:
        indices: [B, Q, selected], indices of the keys that each of the last Q positions selects. Keys that the causal
            mask and the documents exclude are not attended to.
        documents: [B, S], document index of every position; None for one document.
        length: S.
        dtype: dtype of the queries.
    """
    keys = torch.arange(length, device=indices.device)
    chosen = torch.zeros((*indices.shape[:2], length), dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, indices.long(), True)
    allowed = allowed_pairs(documents, None, keys[length - indices.shape[1] :], keys)
    return AttentionMask(additive=_additive(allowed & chosen[:, None], dtype))


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)


def allowed_pairs(documents: Tensor | None, window: int | None, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether a query attends to a key, bool [B or 1, 1, Q, K], from their positions [Q] and [K]."""
    distance = queries[:, None] - keys[None, :]
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    if documents is None:
        return allowed[None, None]
    return allowed & (documents[:, queries][:, None, :, None] == documents[:, keys][:, None, None, :])


def positions_in_documents(documents: Tensor) -> Tensor:
    """Returns every position's distance from the first of its document: [B, S] -> int64 [B, S]."""
    positions = torch.arange(documents.shape[1], device=documents.device)
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return positions - torch.where(first, positions, 0).cummax(1).values


def _block_mask(documents: Tensor | None, window: int | None, queries: Tensor, keys: Tensor) -> BlockMask:
    """Makes FlexAttention's table of the blocks attended to in part, and in full.

    A block of keys is needed if it is not after the block of queries, is within the window, and the blocks' ranges of
    documents overlap. It is attended to in full if all its keys come before all queries, within the window of each, and
    both blocks belong to one document. Nothing of size Q x K is made.

    Args:
        documents: [B, S], document index of every position; None for one document.
        window: positions that a query attends to, itself included; None for all.
        queries: positions [Q], ascending.
        keys: positions [K], ascending.
    """
    (q_start, q_end), (k_start, k_end) = _block_range(queries[None]), _block_range(keys[None])
    q_start, q_end, k_start, k_end = q_start[0, :, None], q_end[0, :, None], k_start[0, None], k_end[0, None]
    needed, full = k_start <= q_end, k_end <= q_start
    if window is not None:
        needed, full = needed & (q_start - k_end < window), full & (q_end - k_start < window)
    # FlexAttention has to mask the missing part of an incomplete last block
    full = full & ((torch.arange(full.shape[-1], device=full.device) + 1) * BLOCK <= keys.numel())
    needed, full = needed[None, None], full[None, None]
    if documents is not None:
        (q_low, q_high), (k_low, k_high) = (_block_range(documents[:, each]) for each in (queries, keys))
        q_low, q_high, k_low, k_high = (
            q_low[:, None, :, None],
            q_high[:, None, :, None],
            k_low[:, None, None],
            k_high[:, None, None],
        )
        needed = needed & (k_high >= q_low) & (q_high >= k_low)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    part = needed & ~full
    rule, lengths = _rule(documents, window, queries, keys), (queries.numel(), keys.numel())
    return BlockMask.from_kv_blocks(
        *_listed(part), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=lengths
    )


def _block_range(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the smallest and largest value of every block: [B, Q] -> [B, n] each."""
    blocks = -(-values.shape[1] // BLOCK)
    missing = blocks * BLOCK - values.shape[1]
    padded = torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1) if missing else values
    grouped = padded.view(values.shape[0], blocks, BLOCK)
    return grouped.amin(-1), grouped.amax(-1)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the chosen blocks of keys for every block of queries, and lists their numbers first; int32."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _rule(documents: Tensor | None, window: int | None, queries: Tensor, keys: Tensor) -> Any:
    """FlexAttention's `mask_mod`: whether a query attends to a key."""
    of_query = of_key = documents
    if documents is not None and queries is not keys:
        of_query, of_key = documents[:, queries], documents[:, keys]

    def distance(query: Tensor, key: Tensor) -> Tensor:
        # in the full sequence, an index is a position
        return query - key if queries is keys else queries[query] - keys[key]

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = distance(query, key) >= 0
        return allowed if window is None else allowed & (distance(query, key) < window)

    def of_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert of_query is not None
        assert of_key is not None
        row = batch if len(of_query) > 1 else batch * 0  # chunks of one document are those of every sample
        return causal(batch, head, query, key) & (of_query[row, query] == of_key[row, key])

    return causal if documents is None else of_document
