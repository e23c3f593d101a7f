"""Sorted hash tables, and the pairs of items with equal hashes in them, a range of hashes at a time.

A run of the job (documents, or the lines of one map task) writes a table with one row per kind of hash: the hashes in
ascending order, and the item of each. A range of hashes is then one contiguous slice of every run: the tasks of a phase
together read everything once, whatever their number. An item's number in the whole job is run * 2^32 + index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_prep.formats.memory_map import map_array

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Word = TypeVar("Word", np.uint64, np.int64)

MEMORY = 256 << 20
"""Memory of a task for its range of hashes, in bytes. Equal hashes are in one range; a run keeps one item per hash."""
PAIRS = "pairs.bin"
"""File of pairs: int64 little-endian, the numbers of two items each."""
_PAIR_BYTES = 16
_ITEM_BYTES = 80  # of a pairs task; 58 were measured, with 128-bit hashes
RUN_BITS = 32
"""Low bits of an item's number: its index within its run; the higher bits are the run."""
_SPACE = 1 << 64


@dataclass(frozen=True)
class HashRange:
    """Hashes whose first word is in [part / parts, (part + 1) / parts) of 2^64."""

    part: int
    parts: int

    def cut(self, words: Hashes) -> slice:
        """The slice of ascending first words, uint64[items], that is in the range."""
        start, end = (-(-_SPACE * part // self.parts) for part in (self.part, self.part + 1))
        first = np.searchsorted(words, np.uint64(start))
        return slice(int(first), len(words) if end == _SPACE else int(np.searchsorted(words, np.uint64(end))))


@dataclass(frozen=True)
class TableSlice:
    """Hashes in ascending order and the numbers of their items; for equal hashes the smaller number comes first.

    Attributes:
        hashes: uint64[words, items].
        numbers: int64[items].
    """

    hashes: Hashes
    numbers: Numbers

    def take(self, chosen: NDArray[np.bool_]) -> TableSlice:
        """The items for which `chosen`, bool[items], is true."""
        return TableSlice(self.hashes[:, chosen], self.numbers[chosen])

    def repeats(self, *, back: int = 1) -> NDArray[np.bool_]:
        """bool[items]: whether at least `back` items before each item have its hash."""
        same = np.ones(len(self.numbers), dtype=bool)
        same[:back] = False
        for word in self.hashes:
            same[back:] &= word[back:] == word[:-back]
        return same


def write_table(directory: Path, name: str, hashes: Hashes) -> None:
    """Writes a table of uint64[rows, words, items], the items in the run's order.

    `NAME.hashes.npy` has the same hashes with each row sorted; `NAME.items.npy`, uint32[rows, items], their items.
    """
    rows, _, count = hashes.shape
    assert count < 1 << RUN_BITS
    items = np.empty((rows, count), dtype=np.uint32)
    ordered = np.empty(hashes.shape, dtype=np.uint64)  # with contiguous rows, unlike `hashes`
    for row, words in enumerate(hashes):
        items[row] = np.lexsort(words[::-1])
        ordered[row] = words[:, items[row]]
    np.save(directory / f"{name}.hashes.npy", ordered)
    np.save(directory / f"{name}.items.npy", items)


def read_slice(run: int, directory: Path, name: str, *, row: int, within: HashRange) -> TableSlice:
    """Reads the items of run number `run` in a range of hashes."""
    hashes = map_array(directory / f"{name}.hashes.npy")[row]
    cut = within.cut(hashes[0])
    items = map_array(directory / f"{name}.items.npy")[row, cut]
    return TableSlice(np.array(hashes[:, cut]), items.astype(np.int64) + (run << RUN_BITS))


def join_slices(slices: Sequence[TableSlice]) -> TableSlice:
    """Merges the slices of several runs, given by ascending run, into one."""
    hashes = np.concatenate([part.hashes for part in slices], axis=1)
    order = np.lexsort(hashes[::-1])
    for word in hashes:
        word[:] = word[order]
    return TableSlice(hashes, np.concatenate([part.numbers for part in slices])[order])


def write_pairs(slices: Iterable[TableSlice], file: BinaryIO) -> tuple[int, TableSlice]:
    """Writes pairs of items with equal hashes: enough pairs to connect all items that share a hash.

    A hash that a slice repeats many times takes the memory of one item only.

    Args:
        slices: slices of one range, by ascending run.

    Returns:
        Number of pairs, and the first item of each hash.
    """
    start = file.tell()
    joined = join_slices([_write_repeats(part, file) for part in slices])  # the slices are freed by now
    first = _write_repeats(joined, file)
    return (file.tell() - start) // _PAIR_BYTES, first


def _write_repeats(part: TableSlice, file: BinaryIO) -> TableSlice:
    """Writes (first, other) for all others in each group of equal hashes; returns the first items."""
    repeats = part.repeats()
    if not repeats.any():
        return part
    first = part.take(~repeats)
    numbers: Numbers = first.numbers[np.cumsum(~repeats)[repeats] - 1]
    file.write(np.stack([numbers, part.numbers[repeats]], axis=1).astype("<i8").tobytes())
    return first


def sorted_unique(values: NDArray[Word]) -> NDArray[Word]:
    """`np.unique` by sorting: 3 ms for 300,000 numbers; numpy 2.4's, by hashing, takes 160 ms."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def ranges(items: int) -> list[HashRange]:
    """Splits the hashes into enough ranges that a job of `items` items stays within `MEMORY` per task."""
    parts = max(1, -(-items * _ITEM_BYTES // MEMORY))
    return [HashRange(part, parts) for part in range(parts)]


def run_and_index(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """The run of each item, and its index within the run."""
    return numbers >> RUN_BITS, numbers & ((1 << RUN_BITS) - 1)


def run_slice(numbers: Numbers, run: int, *, first: int = 0, end: int = 1 << RUN_BITS) -> slice:
    """The slice of ascending numbers that has items [first, end) of a run."""
    bounds = np.searchsorted(numbers, [(run << RUN_BITS) + first, (run << RUN_BITS) + end])
    return slice(int(bounds[0]), int(bounds[1]))
