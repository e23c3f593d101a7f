"""The input of a forward pass that continues sequences: the new tokens, and the keys and values of earlier tokens.

The pass uses the same decoder, in the same layout, as training. With a key/value cache its input is the tokens since
the previous pass; without a cache, the whole sequence.

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
from pipeline.models.masks import AttentionMask, Span, make_decoding_mask, split_span


@dataclass(frozen=True)
class DecodingBatch(MicroBatch):
    """A micro-batch without targets: T new tokens of sequences of S = `first` + T. `documents` is [B, S].

    Attributes:
        first: position of the first new token.
        cache: keys and values of earlier positions, to which the pass adds its own. Without a cache it is None, and
            `first` is 0.
    """

    first: int = 0
    cache: DynamicCache | None = None

    def to(self, _device: torch.device) -> DecodingBatch:
        """Returns itself, since it was made on its device."""
        return self

    def cache_arguments(self) -> dict[str, Any]:
        """Returns a Hugging Face model's arguments for the cache."""
        return {"use_cache": False} if self.cache is None else {"use_cache": True, "past_key_values": self.cache}

    def context(self, dtype: torch.dtype) -> AttentionContext:
        """Makes the context of `models.attention`, for queries of a dtype."""
        length = self.first + self.input_ids.shape[1]
        return _DecodingContext(length, self.documents, {}, flex=False, first=self.first, dtype=dtype)


@dataclass(frozen=True)
class _DecodingContext(AttentionContext):
    """An attention context in which the first layer of a kind makes the mask, which is then kept in `masks`."""

    first: int = 0
    dtype: torch.dtype = torch.float32

    def mask(self, span: Span, query: Tensor) -> AttentionMask:
        """Returns the mask of a layer with a span."""
        made: dict[Span, AttentionMask] = self.masks  # type: ignore[assignment]
        if span not in made:
            documents, window = split_span(self.documents, span, length=self.length, device=query.device)
            place = {"first": self.first, "length": self.length, "dtype": self.dtype, "device": query.device}
            made[span] = make_decoding_mask(documents, window, **place)  # type: ignore[arg-type]
        return made[span]


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
        cache: keys and values of earlier positions, or None; the caller removes those of the padding.
        multiple: number of tensor-parallel ranks.
    """
    padding = -ids.shape[1] % multiple

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[:, -1:].expand(-1, padding)], dim=1) if padding else tensor

    ids, positions = padded(ids), padded(positions)
    documents = None if documents is None else padded(documents)
    labels = torch.full_like(ids, IGNORE)
    return DecodingBatch(ids, labels, positions, documents, first=first, cache=cache)
