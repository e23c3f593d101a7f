"""Best-fit-decreasing bin packing, for all pieces of one length at a time.

Ding et al. 2024, "Fewer truncations improve language modeling" (arXiv:2404.10830), section 3: pieces are placed in
descending order of length, each into the fullest bin that still has room, or else into a new bin. Lengths are integers
up to the bin's size, which allows placing all pieces of one length together. The result equals placing them one by one,
at a cost that grows with the number of distinct lengths instead of the number of pieces.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def best_fit(lengths: I64, *, size: int) -> I64:
    """Packs pieces into bins; returns the bin of every piece.

    Args:
        lengths: int64 [n], length of each piece, from 1 to `size`.
        size: capacity of a bin.

    Returns:
        int64 [n], numbers of bins from 0, in the order of their first pieces.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    bounds = [0, *(np.flatnonzero(np.diff(descending)) + 1).tolist(), descending.size]
    bins, chosen = _Bins(size), np.empty(descending.size, dtype=np.int64)
    for first, end in pairwise(bounds):
        if end > first:
            chosen[first:end] = bins.place(int(descending[first]), end - first)
    number = np.empty_like(chosen)
    number[order] = chosen
    return _renumber(number, bins.count)


class _Bins:
    """Bins by free room; `count` is the number of all bins."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self._size = size
        self._by_room: list[list[I64]] = [[] for _ in range(size + 1)]
        self._rooms = 0  # bit r is set if there are bins with room r

    def place(self, length: int, pieces: int) -> I64:
        """Places pieces of one length, which is at most the length of any earlier piece.

        Returns:
            int64 [pieces], bin of each piece.
        """
        placed: list[I64] = []
        while pieces:
            room, bins = self._take_fullest(length, pieces)
            each = room // length  # a bin that got a piece stays the fullest fitting bin until no piece fits
            full = min(bins.size, pieces // each)
            placed.append(np.repeat(bins[:full], each))
            self._put(room - each * length, bins[:full])
            pieces -= full * each
            if 0 < pieces < each and full < bins.size:
                placed.append(np.repeat(bins[full], pieces))
                self._put(room - pieces * length, bins[full : full + 1])
                pieces, full = 0, full + 1
            self._put(room, bins[full:])
        return np.concatenate(placed)

    def _take_fullest(self, length: int, pieces: int) -> tuple[int, I64]:
        """Removes the bins with the least sufficient room: (room, their numbers); makes new bins if there are none."""
        fitting = self._rooms >> length
        if not fitting:
            first = self.count
            self.count += -(-pieces // (self._size // length))
            return self._size, np.arange(first, self.count)
        room = length + (fitting & -fitting).bit_length() - 1
        bins = self._by_room[room].pop()
        if not self._by_room[room]:
            self._rooms &= ~(1 << room)
        return room, bins

    def _put(self, room: int, bins: I64) -> None:
        if bins.size and room:
            self._by_room[room].append(bins)
            self._rooms |= 1 << room


def _renumber(number: I64, bins: int) -> I64:
    """Renumbers bins in the order of their first pieces."""
    first = np.full(bins, number.size, dtype=np.int64)
    np.minimum.at(first, number, np.arange(number.size))
    new = np.empty(bins, dtype=np.int64)
    new[np.argsort(first, kind="stable")] = np.arange(bins)
    return new[number]
