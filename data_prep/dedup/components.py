"""Connected components of the candidate pairs: decides which exact and near duplicates are dropped.

Documents connected by pairs, over any number of steps, are duplicates of each other; the one of the smallest rank is
kept. This is the only deduplication task whose memory grows with the input: 60 MB, a bit for each document, and for
each document that is in a pair 17 bytes, or 28 where all are in one run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.dedup.document_tasks import RANK
from data_prep.dedup.table import PAIRS, RUN_BITS, Numbers, run_and_index, run_slice, sorted_unique
from data_prep.formats.memory_map import map_array
from data_prep.task import Counts, DirectoryTask, Report

KEEP, EXACT_DUPLICATE, NEAR_DUPLICATE = 0, 1, 2
_CHUNK = 1 << 18  # pairs at a time: 4 MiB


@dataclass(frozen=True)
class ComponentsTask(DirectoryTask):
    """Computes the connected components of all pairs and writes the decision for each document.

    For each run it writes `drops_path(directory, run)`, uint8[documents], with `KEEP`, `EXACT_DUPLICATE` or
    `NEAR_DUPLICATE`. The marker counts the `exact` and `near` duplicates.

    Args:
        exact, near: directories with pairs of exact and of near duplicates.
        runs: the runs' directories, in the order that numbers the documents of the pairs.
    """

    exact: tuple[Path, ...]
    near: tuple[Path, ...]
    runs: Sequence[Path]
    directory: Path

    @property
    def name(self) -> str:
        """See `Task.name`."""
        return "dedup components"

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        numbers, reasons = self._find_duplicates()
        for run, directory in enumerate(self.runs):
            of_run = run_slice(numbers, run)
            drops = np.full(len(map_array(directory / RANK)), KEEP, dtype=np.uint8)
            drops[run_and_index(numbers[of_run])[1]] = reasons[of_run]
            np.save(drops_path(scratch, run), drops)
        counts = np.bincount(reasons, minlength=3).tolist()
        done = {"exact": counts[EXACT_DUPLICATE], "near": counts[NEAR_DUPLICATE]}
        report(Counts(dropped=Counter({f"{kind} copy": count for kind, count in done.items()})))
        return done

    def _find_duplicates(self) -> tuple[Numbers, NDArray[np.uint8]]:
        """The numbers of all documents in a pair, ascending, and the decision for each."""
        paired = _PairedDocuments([*self.exact, *self.near], self.runs)
        position = _positions(_ranks_of(paired, self.runs))
        numbers = paired.numbers()  # made again: they need not be kept beside the ranks
        parents = np.arange(len(numbers), dtype=position.dtype)
        reasons = np.full(len(numbers), KEEP, dtype=np.uint8)
        for directories, reason in ((self.exact, EXACT_DUPLICATE), (self.near, NEAR_DUPLICATE)):
            for directory in directories:
                _union_all(directory, parents, numbers, position)
            for part in _slices(len(parents)):
                attached = parents[part] != np.arange(part.start, part.stop, dtype=parents.dtype)
                reasons[part][attached & (reasons[part] == KEEP)] = reason
        return numbers, reasons[position]


def drops_path(directory: Path, run: int) -> Path:
    """The file in which a finished `ComponentsTask` has the decisions for the documents of a run."""
    return directory / f"run-{run:06d}.npy"


def union_pairs(parents: NDArray[Any], first: NDArray[Any], second: NDArray[Any]) -> None:
    """Union-find: unites the trees of items `first[i]` and `second[i]`, for all i, in place.

    `parents`, integers [items], is a forest in which no item has a parent greater than itself, so the root of a tree is
    its smallest item. Every round attaches each greater root of a pair to the smallest root that it is paired with:
    the number of trees left to unite at least halves.
    """
    while len(first):
        first, second = find_roots(parents, first), find_roots(parents, second)
        apart = first != second
        low, high = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        np.minimum.at(parents, high, low)
        first, second = low, high


def find_roots(parents: NDArray[Any], items: NDArray[Any]) -> NDArray[Any]:
    """The root of each item's tree; the items are attached directly to it (path compression)."""
    found: NDArray[Any] = parents[items]
    while True:
        above = parents[found]
        if np.array_equal(above, found):
            parents[items] = found
            return found
        found = above


def _read_pairs(directory: Path) -> Iterator[NDArray[np.int64]]:
    """Yields int64[pairs, 2], up to `_CHUNK` pairs at a time."""
    with (directory / PAIRS).open("rb") as file:
        while len(pairs := np.fromfile(file, dtype="<i8", count=2 * _CHUNK)):
            yield pairs.astype(np.int64, copy=False).reshape(-1, 2)


class _PairedDocuments:
    """The documents in any pair, a bit for each document of all runs.

    Args:
        directories: with pairs.
        runs: the runs' directories.
    """

    def __init__(self, directories: Sequence[Path], runs: Sequence[Path]) -> None:
        documents = np.array([len(map_array(each / RANK)) for each in runs], dtype=np.int64)
        self._first = np.concatenate([[0], np.cumsum(-(-documents // 8))])  # byte of each run
        self._bits = np.zeros(int(self._first[-1]), dtype=np.uint8)
        for directory in directories:
            for pairs in _read_pairs(directory):
                run, index = run_and_index(sorted_unique(pairs.reshape(-1)))
                np.bitwise_or.at(
                    self._bits, self._first[run] + (index >> 3), np.left_shift(1, index & 7).astype(np.uint8)
                )

    def of_run(self, run: int) -> Numbers:
        """The indices of those of a run, ascending."""
        bits = self._bits[self._first[run] : self._first[run + 1]]
        return np.flatnonzero(np.unpackbits(bits, bitorder="little"))

    def numbers(self) -> Numbers:
        """The numbers of all, ascending."""
        found = np.empty(int(np.bitwise_count(self._bits).sum(dtype=np.int64)), dtype=np.int64)
        end = 0
        for run in range(len(self._first) - 1):
            index = self.of_run(run)
            found[end : end + len(index)] = index + (run << RUN_BITS)
            end += len(index)
        return found

    def __len__(self) -> int:
        return int(np.bitwise_count(self._bits).sum(dtype=np.int64))


def _ranks_of(paired: _PairedDocuments, runs: Sequence[Path]) -> NDArray[np.int64]:
    found, end = np.empty(len(paired), dtype=np.int64), 0
    for run, directory in enumerate(runs):
        index = paired.of_run(run)
        if len(index):
            found[end : end + len(index)] = map_array(directory / RANK)[index]
            end += len(index)
    return found


def _positions(ranks: NDArray[np.int64]) -> NDArray[Any]:
    """The position of each rank in ascending order; of four bytes where that is enough."""
    order = np.argsort(ranks)
    position = np.empty(len(order), dtype=np.int32 if len(order) < 1 << 31 else np.int64)
    for part in _slices(len(order)):
        after = order[part.start : part.stop + 1]
        assert (np.diff(ranks[after]) > 0).all(), "two documents of one rank"
        position[order[part]] = np.arange(part.start, part.stop, dtype=position.dtype)
    return position


def _slices(count: int) -> Iterator[slice]:
    """All of so many items, some at a time."""
    return (slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


def _union_all(directory: Path, parents: NDArray[Any], numbers: Numbers, position: NDArray[Any]) -> None:
    for pairs in _read_pairs(directory):
        ends = position[_index_of(numbers, pairs.reshape(-1))].reshape(-1, 2)
        union_pairs(parents, ends[:, 0], ends[:, 1])


def _index_of(numbers: Numbers, wanted: Numbers) -> NDArray[np.intp]:
    """The index of each wanted number in ascending numbers. Searching in ascending order is ten times as fast."""
    order = np.argsort(wanted)
    found = np.empty_like(order)
    found[order] = np.searchsorted(numbers, wanted[order])
    return found
