"""Connected components of the candidate pairs: decides which exact and near duplicates are dropped.

Documents connected by pairs, over any number of steps, are duplicates of each other; the one of the smallest rank is
kept. This is the only deduplication task whose memory grows with the input: 60 MB, and 22 bytes for each document that
is in a pair.
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
from data_prep.dedup.table import PAIRS, Numbers, run_and_index, run_slice, sorted_unique
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
            drops = np.full(len(np.load(directory / RANK, mmap_mode="r")), KEEP, dtype=np.uint8)
            drops[run_and_index(numbers[of_run])[1]] = reasons[of_run]
            np.save(drops_path(scratch, run), drops)
        counts = np.bincount(reasons, minlength=3).tolist()
        done = {"exact": counts[EXACT_DUPLICATE], "near": counts[NEAR_DUPLICATE]}
        report(Counts(dropped=Counter({f"{kind} copy": count for kind, count in done.items()})))
        return done

    def _find_duplicates(self) -> tuple[Numbers, NDArray[np.uint8]]:
        """The numbers of all documents in a pair, ascending, and the decision for each."""
        numbers = _paired_numbers([*self.exact, *self.near])
        position = _positions(_ranks_of(numbers, self.runs))
        parents = np.arange(len(numbers))
        for directory in self.exact:
            _union_all(directory, parents, numbers, position)
        reasons = np.where(_is_root(parents), KEEP, EXACT_DUPLICATE).astype(np.uint8)
        for directory in self.near:
            _union_all(directory, parents, numbers, position)
        reasons[~_is_root(parents) & (reasons == KEEP)] = NEAR_DUPLICATE
        return numbers, reasons[position]


def drops_path(directory: Path, run: int) -> Path:
    """The file in which a finished `ComponentsTask` has the decisions for the documents of a run."""
    return directory / f"run-{run:06d}.npy"


def union_pairs(parents: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
    """Union-find: unites the trees of items `first[i]` and `second[i]`, for all i, in place.

    `parents`, int64[items], is a forest in which no item has a parent greater than itself, so the root of a tree is
    its smallest item. Every round attaches each greater root of a pair to the smallest root that it is paired with:
    the number of trees left to unite at least halves.
    """
    while len(first):
        first, second = find_roots(parents, first), find_roots(parents, second)
        apart = first != second
        low, high = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        np.minimum.at(parents, high, low)
        first, second = low, high


def find_roots(parents: NDArray[np.int64], items: NDArray[np.int64]) -> NDArray[np.int64]:
    """The root of each item's tree; the items are attached directly to it (path compression)."""
    found = parents[items]
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


def _paired_numbers(directories: Sequence[Path]) -> Numbers:
    """The numbers in any pair, ascending, each once. New ones are merged once they are a quarter of the known ones."""
    known, fresh, pending = np.empty(0, dtype=np.int64), [np.empty(0, dtype=np.int64)], 0
    for directory in directories:
        for pairs in _read_pairs(directory):
            fresh.append(sorted_unique(pairs.reshape(-1)))
            pending += len(fresh[-1])
            if pending > len(known) // 4:
                known, fresh, pending = sorted_unique(np.concatenate([known, *fresh])), [], 0
    return sorted_unique(np.concatenate([known, *fresh]))


def _ranks_of(numbers: Numbers, runs: Sequence[Path]) -> NDArray[np.int64]:
    found = np.empty(len(numbers), dtype=np.int64)
    for run, directory in enumerate(runs):
        of_run = run_slice(numbers, run)
        if of_run.start < of_run.stop:
            found[of_run] = np.load(directory / RANK, mmap_mode="r")[run_and_index(numbers[of_run])[1]]
    return found


def _positions(ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of each rank in ascending order."""
    order = np.argsort(ranks, kind="stable")
    ranks.sort()
    assert (ranks[1:] > ranks[:-1]).all(), "two documents of one rank"
    del ranks
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position


def _union_all(directory: Path, parents: NDArray[np.int64], numbers: Numbers, position: NDArray[np.int64]) -> None:
    for pairs in _read_pairs(directory):
        ends = position[_index_of(numbers, pairs.reshape(-1))].reshape(-1, 2)
        union_pairs(parents, ends[:, 0], ends[:, 1])


def _index_of(numbers: Numbers, wanted: Numbers) -> NDArray[np.intp]:
    """The index of each wanted number in ascending numbers. Searching in ascending order is ten times as fast."""
    order = np.argsort(wanted)
    found = np.empty_like(order)
    found[order] = np.searchsorted(numbers, wanted[order])
    return found


def _is_root(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.equal(parents, np.arange(len(parents)))
