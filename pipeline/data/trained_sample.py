"""A sample as the model trains on it: after fill-in-the-middle, with the positions that enter the loss. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_prep.formats.indexed import IndexedTokens
from pipeline.data.dataset import TokenDataset
from pipeline.data.mixture import DataMixture


@dataclass(frozen=True)
class TrainedDocument:
    """The part of a document in a sample.

    Attributes:
        origin: slice of the document that the tokens come from.
        tokens: int64 [n], ids in the order the model reads them.
        targets: bool [n], whether the token is a target, whose loss counts in the step's loss.
    """

    origin: DocumentSlice
    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.bool_]

    @property
    def rearranged(self) -> bool:
        """Whether fill-in-the-middle has changed the order of the tokens."""
        return not np.array_equal(self.tokens, self.origin.tokens[: self.tokens.size])


def trained_documents(mixture: DataMixture, number: int, *, mask_documents: bool) -> Iterator[TrainedDocument]:
    """Yields the documents of a sample, in order, as the loader hands them to the model; padding is left out.

    Args:
        mixture: the data of the run.
        number: global number of the sample, from 0.
        mask_documents: `data.mask_documents`: the first token of a document is not predicted from the one before.
    """
    location, samples = mixture.order.locate([number]), np.asarray([number], dtype=np.int64)
    row, boundaries = mixture.rows(location), mixture.boundaries(samples)
    targets = mixture.loss_mask(location) if mixture.masked else np.ones(row.shape, dtype=np.bool_)
    if mixture.fim is not None:
        row, boundaries = mixture.fim.rows(row, boundaries, samples), mixture.fim.boundaries(boundaries, samples)
    targets[:, 0] = False  # no token precedes the first one
    boundaries.clear_non_targets(targets[:, 1:], masked=mask_documents)
    end = row.shape[1] if boundaries.used is None else int(boundaries.used[0])
    cuts = [0, *sorted(boundaries.at.tolist()), end]
    slices = document_slices(mixture.sources[int(location.source[0])], int(location.window[0]))
    # fill-in-the-middle lengthens documents: zip leaves out the last ones, which may have left the sample
    for origin, start, stop in zip(slices, cuts, cuts[1:], strict=False):
        yield TrainedDocument(origin, row[0, start:stop].astype(np.int64), targets[0, start:stop])


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
    """Yields the parts of documents that make up a sample's T + 1 tokens, in order, without padding.

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
