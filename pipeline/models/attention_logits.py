"""Computes the largest attention logit of every key head beside attention, without a tensor of size T x T.

A logit is the scaled product of a query and a key that it attends to, before the softmax. If an attention module has a
tensor under `LARGEST`, every forward pass in training raises it to the largest logits. Under torch.compile this is one
operator, without a graph break. In eager layers, activation checkpointing does not repeat it.

QK-Clip needs it: Kimi Team 2025, Kimi K2 (arXiv:2507.20534), section 2.1.

Shapes: B samples, H heads, K key heads, T queries and S keys that are compared, d head size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.models.masks import allowed_pairs

LARGEST = "largest_logits"
"""Attribute of an attention module: fp32 [K], the largest logits so far of the key heads that this rank computes."""

REFERENCE_NAME = "headrace_reference"
"""Value of `attn_implementation` for Hugging Face's sdpa with the largest logits, used by the reference."""

_ROWS, _SCORES = 256, 1 << 25
"""Positions in a block of queries, and scores in a block: 64 MiB in bf16."""


@dataclass(frozen=True)
class LogitWatch:
    """A watch that collects the largest logits of a layer's forward pass.

    Attributes:
        largest: fp32 [K], the largest logits so far of this rank's key heads.
        documents: [B, positions of the sequence], document index of every position; None for one document.
        window: positions that a query attends to; None for all.
        scale: factor that multiplies the products.
    """

    largest: Tensor
    documents: Tensor | None
    window: int | None
    scale: float

    def see(
        self,
        query: Tensor,
        key: Tensor,
        *,
        queries: Sequence[range],
        keys: Sequence[range],
        first_head: int = 0,
        copies: int = 1,
    ) -> None:
        """Raises the recorded maxima to the logits of these queries and keys, where those are larger.

        Args:
            query: [B, H, T, d].
            key: [B, K, S, d].
            queries: positions of the queries in the sequence, as chunks in ascending order.
            keys: positions of the keys, as chunks in ascending order.
            first_head: index of this rank's first key head among the copies of all key heads.
            copies: number of copies of every key head.
        """
        ends = [[end for each in chunks for end in (each.start, each.stop)] for chunks in (queries, keys)]
        with torch.no_grad():
            raise_to_largest(
                self.largest,
                query.detach(),
                key.detach(),
                self.documents,
                self.scale,
                self.window,
                *ends,
                first_head,
                copies,
            )


def watch_of(module: nn.Module, documents: Tensor | None, window: int | None, *, scale: float) -> LogitWatch | None:
    """Makes the `LogitWatch` of a forward pass; None if the module's logits are not needed, e.g. outside training."""
    largest: Tensor | None = getattr(module, LARGEST, None)
    if largest is None or not (module.training and torch.is_grad_enabled()):
        return None
    return LogitWatch(largest, documents, window, scale)


@torch.library.custom_op("headrace::raise_to_largest", mutates_args=("largest",))
def raise_to_largest(  # noqa: PLR0913, PLR0917  an operator of torch takes no objects
    largest: Tensor,
    query: Tensor,
    key: Tensor,
    documents: Tensor | None,
    scale: float,
    window: int | None,
    queries: list[int],
    keys: list[int],
    first_head: int,
    copies: int,
) -> None:
    """Implements `LogitWatch.see`; `queries` and `keys` are the starts and ends of the chunks."""
    if torch._C._current_graph_task_id() != -1:  # a recomputation in a backward pass
        return
    batch, heads, _, size = query.shape
    shared = key.shape[1]
    grouped = query.reshape(batch, shared, heads // shared, query.shape[2], size)
    found = torch.full((shared,), -torch.inf, device=key.device)
    columns = max(1, _SCORES // (batch * heads * _ROWS))
    for row, of_query in _blocks(queries, _ROWS):
        scaled = grouped[..., row : row + len(of_query), :] * scale
        for column, of_key in _blocks(keys, columns):
            if of_key.start >= of_query.stop or (window is not None and of_query.start - of_key.stop + 1 >= window):
                continue
            block = scaled.flatten(2, 3) @ key[:, :, column : column + len(of_key)].mT
            scores = block.unflatten(2, (-1, len(of_query)))  # [B, K, H / K, T, S] of the block
            outside = window is not None and of_query.stop - 1 - of_key.start >= window
            if documents is not None or outside or of_key.stop - 1 > of_query.start:
                positions = (torch.arange(r.start, r.stop, device=key.device) for r in (of_query, of_key))
                scores.masked_fill_(~allowed_pairs(documents, window, *positions)[:, :, None], -torch.inf)
            found = torch.maximum(found, scores.amax((0, 2, 3, 4)).float())
    found.clamp_(max=torch.finfo(query.dtype).max)  # attention's own sums do not overflow in fp16
    numbers = (first_head + torch.arange(shared, device=key.device)) // copies
    largest.scatter_reduce_(0, numbers, found, "amax")


@raise_to_largest.register_fake
def _(*_args: Any, **_options: Any) -> None:
    return None


def _blocks(chunks: list[int], size: int) -> Iterator[tuple[int, range]]:
    """Yields (index of the first position, positions) of every block; `chunks` lists starts and ends."""
    index = 0
    for start, stop in zip(chunks[::2], chunks[1::2], strict=True):
        for first in range(start, stop, size):
            positions = range(first, min(first + size, stop))
            yield index, positions
            index += len(positions)


def _reference_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Runs Hugging Face's own attention, and finds the largest of all T x T logits at once, for short sequences.

    It is sdpa; for a module with attention sinks, which sdpa does not have, the eager function of its architecture.
    """
    scaling = options.get("scaling")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    watch, length = watch_of(module, None, None, scale=scale), query.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None:
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    if watch is not None and torch._C._current_graph_task_id() == -1:
        with torch.no_grad():
            scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
            of_heads = scores.float().masked_fill(~seen, -torch.inf).amax((0, 2, 3))
            torch.maximum(watch.largest, of_heads.unflatten(0, (key.shape[1], -1)).amax(1), out=watch.largest)
    if options.get("s_aux") is not None:
        eager: Any = sys.modules[type(module).__module__].eager_attention_forward
        additive = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, -torch.inf)
        return eager(module, query, key, value, additive, **{**options, "scaling": scale})[0], None
    attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return attended


AttentionInterface.register(REFERENCE_NAME, _reference_forward)
AttentionMaskInterface.register(REFERENCE_NAME, sdpa_mask)
