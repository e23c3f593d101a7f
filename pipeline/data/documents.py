"""Which documents lie in a sample: found in the token file's index, never guessed from the tokens.

A sample is a window of S + 1 tokens; its position `at` is a border when a document begins there (1 <= at <= S: that one
begins at position 0 changes nothing). The end of a packed sample may be padding. From the borders follow who may see
whom, the place of every token in its document, and which labels do not count, because the next token belongs to another
document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.formats.tokenfile import TokenFile

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Borders:
    """Documents' borders within samples: `sample` int64 [n], its number among those asked for; `at` int64 [n].

    `used` int64 [samples]: tokens of each that are no padding, S + 1 at most; None where there is no padding.
    """

    sample: I64
    at: I64
    used: I64 | None = None

    def of(self, samples: I64) -> Borders:
        """The borders of some of the samples, which are numbered anew in the order given; each at most once."""
        new = np.full(max(int(self.sample.max(initial=-1)), int(samples.max(initial=-1))) + 1, -1)
        new[samples] = np.arange(samples.size)
        number = new[self.sample]
        used = None if self.used is None else self.used[samples]
        return Borders(number[number >= 0], self.at[number >= 0], used)

    def parts(self, samples: int, *, length: int) -> tuple[I64, I64]:
        """Documents and padding as parts of the samples' inputs, laid end to end; of each sample one part at least.

        Args:
            samples: as many, from the first; those past the last that is known are one part.
            length: S.

        Returns:
            sample int64 [parts], rising; at int64 [parts], place in it where the part begins, rising within a sample.
        """
        inside = self.at < length
        begun = [np.arange(samples) * length, self.sample[inside] * length + self.at[inside]]
        if self.used is not None:  # padding is kept apart as a document is
            short = np.flatnonzero(self.used < length)
            begun.append(short * length + self.used[short])
        sample, at = np.divmod(np.sort(np.concatenate(begun)), length)
        return sample, at

    def take_targets(self, targets: npt.NDArray[np.bool_], *, masked: bool) -> None:
        """Sets the places to false that are no targets: padding, and where `masked` those before a border.

        Args:
            targets: bool [samples, S]; place t is the token that follows input t.
        """
        if self.used is not None:
            places = np.arange(targets.shape[1])
            targets &= places < self.used[:, None] - 1
        if masked:
            targets[self.sample, self.at - 1] = False

    def without_target(self, *, length: int, masked: bool) -> int:
        """Places of all samples that are no targets: padding, and where `masked` those before a border."""
        padding = 0 if self.used is None else int((length + 1 - self.used).sum())
        return padding + (self.at.size if masked else 0)


def join(parts: list[tuple[I64, Borders]]) -> Borders:
    """Borders of several groups of samples as one; each comes with the numbers its samples are to have."""
    empty = np.empty(0, dtype=np.int64)
    used = np.empty(sum(numbers.size for numbers, _ in parts), dtype=np.int64)
    for numbers, borders in parts:
        if borders.used is not None:
            used[numbers] = borders.used
    return Borders(
        np.concatenate([empty, *(numbers[b.sample] for numbers, b in parts)]),
        np.concatenate([empty, *(b.at for _, b in parts)]),
        used if parts and all(b.used is not None for _, b in parts) else None,
    )


def find_borders(file: TokenFile, starts: I64, *, length: int) -> Borders:
    """Borders within the windows [start, start + length] of a token file; O(windows x log documents).

    Args:
        file: an open token file.
        starts: int64 [n], first token of each window.
        length: S.
    """
    # views without the map's class, whose every indexing costs more than the reading
    offsets, index = np.asarray(file.byte_offsets), np.asarray(file.document_index)
    width = file.dtype.itemsize
    first_sequence = _at_least(offsets, (starts + 1) * width)
    end_sequence = _at_least(offsets, (starts + length + 1) * width)
    first, end = _documents(index, first_sequence), _documents(index, end_sequence)
    found = end - first
    window = np.repeat(np.arange(starts.size), found)
    before = np.cumsum(found) - found
    document = np.arange(window.size) - np.repeat(before - first, found)
    at = offsets[index[document]] // width - starts[window]
    # documents without tokens begin where the next one does
    once = np.unique(window * (length + 1) + at)
    return Borders(*np.divmod(once, length + 1))


def _documents(index: npt.NDArray[Any], sequences: I64) -> I64:
    """int64 [n], the first document that begins with each of some sequences, or behind it."""
    # one sequence per document, as data_prep writes them: half of the search is saved
    if sequences.max(initial=0) < index.size:
        behind = index[np.maximum(sequences - 1, 0)] >= sequences  # the document before it
        if not np.any((index[sequences] < sequences) | (behind & (sequences > 0))):
            return sequences
    return _at_least(index[:-1], sequences)


def _at_least(rising: npt.NDArray[Any], values: I64) -> I64:
    """int64 [n], place of the first entry that is not below each value.

    As np.searchsorted, which would copy the whole array first: the numbers in an index file are not aligned.
    """
    low, high = np.zeros(values.size, dtype=np.int64), np.full(values.size, len(rising), dtype=np.int64)
    while np.any(open_ := low < high):
        middle = (low + high) // 2
        below = open_.copy()
        below[open_] = rising[middle[open_]] < values[open_]
        low[below] = middle[below] + 1
        high[open_ & ~below] = middle[open_ & ~below]
    return low
