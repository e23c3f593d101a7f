"""The input of a forward pass that continues sequences: the tokens that are new, and the keys and values of the others.

Such a pass goes through the same decoder, in the same layout, as one of training. With a key/value cache its input is
the tokens since the pass before; without one it is the whole sequence again.

Shapes: B samples, T positions of the input, S of the sequence up to its last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from pipeline.data.micro_batch import IGNORE, MicroBatch
from pipeline.models.attention import AttentionContext
from pipeline.models.masks import AttentionMask, make_decoding_mask


@dataclass(frozen=True)
class DecodingBatch(MicroBatch):
    """A micro-batch without targets: T new tokens of sequences of S = `first` + T. `documents` is [B, S].

    Attributes:
        first: position of the first new token.
        cache: keys and values of the positions before, to which the pass adds those of its own; None without a cache,
            where `first` is 0.
    """

    first: int = 0
    cache: DynamicCache | None = None

    def to(self, _device: torch.device) -> DecodingBatch:
        """Returns itself: it was made on its device."""
        return self

    def cache_arguments(self) -> dict[str, Any]:
        """Arguments of a Hugging Face model for its cache."""
        return {"use_cache": False} if self.cache is None else {"use_cache": True, "past_key_values": self.cache}

    def context(self, dtype: torch.dtype) -> AttentionContext:
        """The context of `models.attention`, for queries of a dtype."""
        return _DecodingContext(self.first + self.input_ids.shape[1], self.documents, {}, first=self.first, dtype=dtype)


@dataclass(frozen=True)
class _DecodingContext(AttentionContext):
    """An attention context whose masks are made by the first layer of a kind, and kept in `masks`."""

    first: int = 0
    dtype: torch.dtype = torch.float32

    def mask(self, window: int | None, query: Tensor) -> AttentionMask:
        """The mask of a layer with a window."""
        made: dict[int | None, AttentionMask] = self.masks  # type: ignore[assignment]
        if window not in made:
            place = {"first": self.first, "length": self.length, "dtype": self.dtype, "device": query.device}
            made[window] = make_decoding_mask(self.documents, window, **place)  # type: ignore[arg-type]
        return made[window]


def decoding_batch(
    ids: Tensor,
    positions: Tensor,
    documents: Tensor | None,
    *,
    first: int,
    cache: DynamicCache | None,
    multiple: int,
) -> DecodingBatch:
    """Makes the input of the next forward pass, padded at its end so that `multiple` divides its positions.

    Args:
        ids: int64 [B, T], the new tokens.
        positions: int64 [B, T], positions of the new tokens in their documents.
        documents: int32 [B, first + T], or None for one document.
        first: position of the first new token in the sequence.
        cache: keys and values of the positions before; the caller crops those of the padding. None without a cache.
        multiple: number of tensor-parallel ranks.
    """
    padding = -ids.shape[1] % multiple

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[:, -1:].expand(-1, padding)], dim=1) if padding else tensor

    ids, positions = padded(ids), padded(positions)
    documents = None if documents is None else padded(documents)
    labels = torch.full_like(ids, IGNORE)
    return DecodingBatch(ids, labels, positions, documents, first=first, cache=cache)
