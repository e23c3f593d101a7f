"""Where the tokens of a sample come from: which documents, and which part of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_prep.formats.tokenfile import TokenFile
from pipeline.data.dataset import TokenDataset


@dataclass(frozen=True)
class Passage:
    """Neighbouring tokens of one document.

    Attributes:
        document: its number in the split, from 0, in the order in which the corpus was read.
        first: place of the first of them in the document, from 0.
        length: tokens of the whole document.
        tokens: int64 [n].
    """

    document: int
    first: int
    length: int
    tokens: npt.NDArray[np.int64]


def passages(dataset: TokenDataset, window: int) -> Iterator[Passage]:
    """The passages of a sample's T + 1 tokens, in order; padding is none.

    Args:
        dataset: a split.
        window: number of the sample in it.
    """
    spans = dataset.spans([window])
    for shard, start, length in zip(spans.shard.tolist(), spans.start.tolist(), spans.length.tolist(), strict=True):
        if shard >= 0:
            first = int(dataset.first_document[shard])
            yield from _within(dataset.file(shard), start, start + length, before=first)


def _within(file: TokenFile, at: int, end: int, *, before: int) -> Iterator[Passage]:
    # of documents without tokens, which begin where the next one does, the last
    number = bisect_right(range(file.documents), at, key=lambda document: _begin(file, document)) - 1
    while at < end:
        begin, stop = _begin(file, number), _begin(file, number + 1)
        upto = min(stop, end)
        if upto > at:
            tokens = np.asarray(file.tokens[at:upto]).astype(np.int64)
            yield Passage(before + number, at - begin, stop - begin, tokens)
        at, number = max(at, upto), number + 1


def _begin(file: TokenFile, document: int) -> int:
    """First token of a document of a token file; of the one after the last, the file's end."""
    sequence = int(file.document_index[document])
    if sequence == len(file.byte_offsets):
        return int(file.tokens.size)
    return int(file.byte_offsets[sequence]) // file.dtype.itemsize
