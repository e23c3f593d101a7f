"""Provenance of a sample: the documents its tokens come from, and which part of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_prep.formats.indexed import IndexedTokens
from pipeline.data.dataset import TokenDataset


@dataclass(frozen=True)
class DocumentSlice:
    """Contiguous tokens of one document.

    Attributes:
        document: index of the document in the split, from 0, in the order in which the corpus was read.
        first: position of the first token in the document, from 0.
        length: tokens of the whole document.
        tokens: int64 [n].
    """

    document: int
    first: int
    length: int
    tokens: npt.NDArray[np.int64]


def document_slices(dataset: TokenDataset, window: int) -> Iterator[DocumentSlice]:
    """The documents' parts that make up a sample's T + 1 tokens, in order, without padding.

    Args:
        dataset: a split.
        window: index of the sample in it.
    """
    spans = dataset.spans([window])
    for shard, start, length in zip(spans.shard.tolist(), spans.start.tolist(), spans.length.tolist(), strict=True):
        if shard >= 0:
            first = int(dataset.first_document[shard])
            yield from _within(dataset.file(shard), start, start + length, before=first)


def _within(file: IndexedTokens, at: int, end: int, *, before: int) -> Iterator[DocumentSlice]:
    # an empty document begins where the next one does: take the last of those that begin here
    number = int(file.first_document_from(np.array([at + 1]))[0]) - 1
    while at < end:
        begin, stop = file.document_starts([number, number + 1]).tolist()
        upto = min(stop, end)
        if upto > at:
            tokens = np.asarray(file.tokens[at:upto]).astype(np.int64)
            yield DocumentSlice(before + number, at - begin, stop - begin, tokens)
        at, number = max(at, upto), number + 1
