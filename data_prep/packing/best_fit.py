"""Best-fit-decreasing bin packing of many pieces at a time.

Ding et al. 2024, "Fewer truncations improve language modeling" (arXiv:2404.10830), section 3: pieces in falling order
of length, each into the fullest bin that still has room, or else into a new one. Lengths are whole numbers up to the
bin's size, so all pieces of one length are dealt out together: the result is that of placing them one by one, at a
cost that grows with the number of different lengths rather than with that of pieces.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def best_fit(lengths: I64, *, size: int) -> I64:
    """The bin of every piece.

    Args:
        lengths: int64 [n], each in 1..size.
        size: of a bin.

    Returns:
        int64 [n], numbers of bins from 0, in the order of their first pieces.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    cuts = [0, *(np.flatnonzero(np.diff(falling)) + 1).tolist(), falling.size]
    bins, chosen = _Bins(size), np.empty(falling.size, dtype=np.int64)
    for first, end in pairwise(cuts):
        if end > first:
            chosen[first:end] = bins.place(int(falling[first]), end - first)
    number = np.empty_like(chosen)
    number[order] = chosen
    return _renumbered(number, bins.made)


class _Bins:
    """Bins by the room that is left in them; `made` is their number."""

    def __init__(self, size: int) -> None:
        self.made = 0
        self._size = size
        self._stacks: list[list[I64]] = [[] for _ in range(size + 1)]
        self._some = 0  # bit r is set where there are bins with room r

    def place(self, length: int, pieces: int) -> I64:
        """Places pieces of one length, which is at most that of all before: int64 [pieces], their bins."""
        placed: list[I64] = []
        while pieces:
            room, bins = self._fullest(length, pieces)
            each = room // length  # once begun, a bin stays the fullest that fits, until no more do
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

    def _fullest(self, length: int, pieces: int) -> tuple[int, I64]:
        """Takes bins with the least room that is enough: (room, their numbers); new ones where none has."""
        fitting = self._some >> length
        if not fitting:
            first = self.made
            self.made += -(-pieces // (self._size // length))
            return self._size, np.arange(first, self.made)
        room = length + (fitting & -fitting).bit_length() - 1
        bins = self._stacks[room].pop()
        if not self._stacks[room]:
            self._some &= ~(1 << room)
        return room, bins

    def _put(self, room: int, bins: I64) -> None:
        if bins.size and room:
            self._stacks[room].append(bins)
            self._some |= 1 << room


def _renumbered(number: I64, bins: int) -> I64:
    """Bins numbered in the order of their first pieces."""
    first = np.full(bins, number.size, dtype=np.int64)
    np.minimum.at(first, number, np.arange(number.size))
    new = np.empty(bins, dtype=np.int64)
    new[np.argsort(first, kind="stable")] = np.arange(bins)
    return new[number]
