"""Pairs of items with equal hashes: as many as it takes to connect all that share one.

`pairs.bin`: int64 little-endian, two numbers of items each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from data_prep.dedup.table import Numbers, TableSlice, join_slices

PAIRS = "pairs.bin"
_PAIR_BYTES = 16


def write_pairs(pieces: Iterable[TableSlice], file: BinaryIO) -> tuple[int, TableSlice]:
    """Writes the pairs of all pieces of a range; a hash that a piece is full of takes the memory of one item.

    Returns:
        how many pairs, and of each hash the first item.
    """
    start = file.tell()
    whole = join_slices([_firsts(piece, file) for piece in pieces])  # the pieces themselves are gone by now
    first = _firsts(whole, file)
    return (file.tell() - start) // _PAIR_BYTES, first


def _firsts(piece: TableSlice, file: BinaryIO) -> TableSlice:
    """Writes (first, other) for all others of each group of equal hashes; returns the first ones."""
    repeats = piece.repeats()
    if not repeats.any():
        return piece
    first = piece.take(~repeats)
    numbers: Numbers = first.numbers[np.cumsum(~repeats)[repeats] - 1]
    file.write(np.stack([numbers, piece.numbers[repeats]], axis=1).astype("<i8").tobytes())
    return first
