"""Document boundaries within samples, from the token file's index; never guessed from the tokens.

A sample is a window of S + 1 tokens; position `at` is a boundary if a document begins there (1 <= at <= S; a document
that begins at position 0 changes nothing). A packed sample may end with padding. The boundaries determine the document
mask of attention, the position of every token in its document, and the labels that are masked because the next token
belongs to another document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_prep.formats.indexed import IndexedTokens

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DocumentBoundaries:
    """Document boundaries within samples.

    Attributes:
        sample: int64 [n], index of the sample among those requested.
        at: int64 [n], position at which a document begins.
        used: int64 [samples], tokens of each sample that are not padding, S + 1 at most; None without padding.
    """

    sample: I64
    at: I64
    used: I64 | None = None

    def of(self, samples: I64) -> DocumentBoundaries:
        """Selects the boundaries of samples, renumbered in the order given; a sample may be given several times."""
        order = np.argsort(self.sample, kind="stable")
        first, end = (np.searchsorted(self.sample[order], samples, side=side) for side in ("left", "right"))
        number = np.repeat(np.arange(samples.size), end - first)
        before = np.cumsum(end - first) - (end - first)
        at = self.at[order[np.arange(number.size) + (first - before)[number]]]
        return DocumentBoundaries(number, at, None if self.used is None else self.used[samples])

    def parts(self, samples: int, *, length: int) -> tuple[I64, I64]:
        """Splits the inputs of samples into documents and padding; every sample has at least one part.

        Args:
            samples: number of samples, from the first; samples beyond the last known one are a single part each.
            length: S.

        Returns:
            Sample of each part, int64 [parts], ascending; position at which the part begins in the sample, int64
            [parts], ascending per sample.
        """
        inside = self.at < length
        begun = [np.arange(samples) * length, self.sample[inside] * length + self.at[inside]]
        if self.used is not None:  # padding is masked like a separate document
            short = np.flatnonzero(self.used < length)
            begun.append(short * length + self.used[short])
        sample, at = np.divmod(np.sort(np.concatenate(begun)), length)
        return sample, at

    def clear_non_targets(self, targets: npt.NDArray[np.bool_], *, masked: bool) -> None:
        """Clears non-target positions in place: padding and, with `masked`, positions that cross a boundary.

        Args:
            targets: bool [samples, S]; position t is the token that follows input t.
        """
        if self.used is not None:
            positions = np.arange(targets.shape[1])
            targets &= positions < self.used[:, None] - 1
        if masked:
            targets[self.sample, self.at - 1] = False

    def count_non_targets(self, *, length: int, masked: bool) -> int:
        """Counts non-target positions in all samples: padding and, with `masked`, positions that cross a boundary."""
        padding = 0 if self.used is None else int((length + 1 - self.used).sum())
        return padding + (self.at.size if masked else 0)


def join(parts: list[tuple[I64, DocumentBoundaries]]) -> DocumentBoundaries:
    """Merges the boundaries of several groups of samples; each group comes with the new indices of its samples."""
    empty = np.empty(0, dtype=np.int64)
    used = np.empty(sum(numbers.size for numbers, _ in parts), dtype=np.int64)
    for numbers, boundaries in parts:
        if boundaries.used is not None:
            used[numbers] = boundaries.used
    return DocumentBoundaries(
        np.concatenate([empty, *(numbers[b.sample] for numbers, b in parts)]),
        np.concatenate([empty, *(b.at for _, b in parts)]),
        used if parts and all(b.used is not None for _, b in parts) else None,
    )


def find_boundaries(file: IndexedTokens, starts: I64, *, length: int) -> DocumentBoundaries:
    """Finds document boundaries in the windows [start, start + length] of a token file; O(windows x log documents).

    Args:
        file: an open token file.
        starts: int64 [n], first token of each window.
        length: S.
    """
    first, end = file.first_document_from(starts + 1), file.first_document_from(starts + length + 1)
    found = end - first
    window = np.repeat(np.arange(starts.size), found)
    before = np.cumsum(found) - found
    document = np.arange(window.size) - np.repeat(before - first, found)
    at = file.document_starts(document) - starts[window]
    # an empty document begins where the next one does
    once = np.unique(window * (length + 1) + at)
    return DocumentBoundaries(*np.divmod(once, length + 1))
