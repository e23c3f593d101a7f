"""Tables of hashes: what tasks that look for equal hashes read, a range of hashes at a time.

A run of the job (the documents of one map task, or its lines) writes a table with one row per kind of hash: the hashes
in ascending order, and whose they are. A range of hashes is then one contiguous piece of every run, so the tasks of a
phase together read everything once, whatever their number. An item of the whole job has a number: run * 2^32 + index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Word = TypeVar("Word", np.uint64, np.int64)

MEMORY = 256 << 20
"""Bytes a task may take for its range of hashes. Equal hashes are one range: of each run they leave one item."""
_ITEM_BYTES = 80  # of such a task; 58 were seen, with 128-bit hashes
_RUN_BITS = 32
_SPACE = 1 << 64


@dataclass(frozen=True)
class Range:
    """Hashes whose first word is in [part / parts, (part + 1) / parts) of 2^64."""

    part: int
    parts: int

    def cut(self, words: Hashes) -> slice:
        """Where the range lies in ascending first words, uint64[items]."""
        start, end = (-(-_SPACE * part // self.parts) for part in (self.part, self.part + 1))
        first = np.searchsorted(words, np.uint64(start))
        return slice(int(first), len(words) if end == _SPACE else int(np.searchsorted(words, np.uint64(end))))


@dataclass(frozen=True)
class TableSlice:
    """Hashes in ascending order and whose they are; of equal ones the smaller number first.

    `hashes`: uint64[words, items]; `numbers`: int64[items].
    """

    hashes: Hashes
    numbers: Numbers

    def take(self, chosen: NDArray[np.bool_]) -> TableSlice:
        """The items for which `chosen`, bool[items], is true."""
        return TableSlice(self.hashes[:, chosen], self.numbers[chosen])

    def repeats(self, *, back: int = 1) -> NDArray[np.bool_]:
        """bool[items]: whether the item `back` places before has the same hash, so at least so many have it before."""
        same = np.ones(len(self.numbers), dtype=bool)
        same[:back] = False
        for word in self.hashes:
            same[back:] &= word[back:] == word[:-back]
        return same


def write_table(directory: Path, name: str, hashes: Hashes) -> None:
    """Writes a table of uint64[rows, words, items], the items in the run's order.

    `NAME.hashes.npy` is the same with each row ascending; `NAME.items.npy`, uint32[rows, items], says whose they are.
    """
    rows, _, count = hashes.shape
    assert count < 1 << _RUN_BITS
    items = np.empty((rows, count), dtype=np.uint32)
    ordered = np.empty(hashes.shape, dtype=np.uint64)  # rows contiguous, which those of `hashes` need not be
    for row, words in enumerate(hashes):
        items[row] = np.lexsort(words[::-1])
        ordered[row] = words[:, items[row]]
    np.save(directory / f"{name}.hashes.npy", ordered)
    np.save(directory / f"{name}.items.npy", items)


def read_slice(run: int, directory: Path, name: str, *, row: int, within: Range) -> TableSlice:
    """What run number `run` has in a range of hashes."""
    hashes = np.load(directory / f"{name}.hashes.npy", mmap_mode="r")[row]
    cut = within.cut(hashes[0])
    items = np.load(directory / f"{name}.items.npy", mmap_mode="r")[row, cut]
    return TableSlice(np.array(hashes[:, cut]), items.astype(np.int64) + (run << _RUN_BITS))


def join_slices(pieces: Sequence[TableSlice]) -> TableSlice:
    """Pieces of several runs, by ascending run, as one."""
    hashes = np.concatenate([piece.hashes for piece in pieces], axis=1)
    order = np.lexsort(hashes[::-1])
    for word in hashes:
        word[:] = word[order]
    return TableSlice(hashes, np.concatenate([piece.numbers for piece in pieces])[order])


def distinct(values: NDArray[Word]) -> NDArray[Word]:
    """`np.unique`, by sorting: of 300,000 numbers in 3 ms, where numpy 2.4's own, by hashing, takes 160."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def ranges(items: int) -> list[Range]:
    """As many ranges as it takes for a job of so many items to stay within `MEMORY` per task."""
    parts = max(1, -(-items * _ITEM_BYTES // MEMORY))
    return [Range(part, parts) for part in range(parts)]


def run_and_index(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Of each item, the run and its index within."""
    return numbers >> _RUN_BITS, numbers & ((1 << _RUN_BITS) - 1)


def of_run(numbers: Numbers, run: int, *, first: int = 0, end: int = 1 << _RUN_BITS) -> slice:
    """Where items [first, end) of a run lie in ascending numbers."""
    bounds = np.searchsorted(numbers, [(run << _RUN_BITS) + first, (run << _RUN_BITS) + end])
    return slice(int(bounds[0]), int(bounds[1]))
