"""Connected components: from pairs of copies to what is dropped.

Documents that are connected by pairs, over any number of steps, are copies of one another; the one of the smallest rank
stays. It is the only task of deduplication whose memory grows with the input: 60 MB, and 22 bytes for each
document that has a pair.
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
from data_prep.dedup.pairs import PAIRS
from data_prep.dedup.table import Numbers, distinct, of_run, run_and_index
from data_prep.task import Counts, DirectoryTask, Report

KEEP, EXACT_COPY, NEAR_COPY = 0, 1, 2
_CHUNK = 1 << 18  # pairs at a time: 4 MiB


@dataclass(frozen=True)
class ComponentsTask(DirectoryTask):
    """Writes which documents are dropped, and why: for each run `drops_of(directory, run)`, uint8[documents], with
    `KEEP`, `EXACT_COPY` or `NEAR_COPY`. `exact` and `near` are directories with pairs; `runs` is what they number.
    The marker counts `exact` and `near` copies."""

    exact: tuple[Path, ...]
    near: tuple[Path, ...]
    runs: Sequence[Path]
    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return "dedup components"

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        numbers, reasons = self._decide()
        for run, directory in enumerate(self.runs):
            here = of_run(numbers, run)
            drops = np.full(len(np.load(directory / RANK, mmap_mode="r")), KEEP, dtype=np.uint8)
            drops[run_and_index(numbers[here])[1]] = reasons[here]
            np.save(drops_of(scratch, run), drops)
        counted = np.bincount(reasons, minlength=3).tolist()
        done = {"exact": counted[EXACT_COPY], "near": counted[NEAR_COPY]}
        report(Counts(dropped=Counter({f"{kind} copy": count for kind, count in done.items()})))
        return done

    def _decide(self) -> tuple[Numbers, NDArray[np.uint8]]:
        numbers = _numbers([*self.exact, *self.near])
        place = _places(_ranks_of(numbers, self.runs))
        parents = np.arange(len(numbers))
        for directory in self.exact:
            _unite_all(directory, parents, numbers, place)
        reasons = np.where(_is_root(parents), KEEP, EXACT_COPY).astype(np.uint8)
        for directory in self.near:
            _unite_all(directory, parents, numbers, place)
        reasons[~_is_root(parents) & (reasons == KEEP)] = NEAR_COPY
        return numbers, reasons[place]


def drops_of(directory: Path, run: int) -> Path:
    """Where a finished `ComponentsTask` has what it says of a run's documents."""
    return directory / f"run-{run:06d}.npy"


def unite(parents: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
    """Connects items `first[i]` and `second[i]`, for all i, in place.

    `parents`, int64[items], is a forest in which no item has a parent greater than itself, so the root of a tree is
    its smallest item. Every round hangs each greater root of a pair below the smallest that it is paired with: what
    has to be joined at least halves.
    """
    while len(first):
        first, second = roots(parents, first), roots(parents, second)
        apart = first != second
        low, high = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        np.minimum.at(parents, high, low)
        first, second = low, high


def roots(parents: NDArray[np.int64], items: NDArray[np.int64]) -> NDArray[np.int64]:
    """The root of each item's tree; the items are hung directly below them."""
    found = parents[items]
    while True:
        above = parents[found]
        if np.array_equal(above, found):
            parents[items] = found
            return found
        found = above


def _pairs(directory: Path) -> Iterator[NDArray[np.int64]]:
    """Yields int64[pairs, 2]."""
    with (directory / PAIRS).open("rb") as file:
        while len(pairs := np.fromfile(file, dtype="<i8", count=2 * _CHUNK)):
            yield pairs.astype(np.int64, copy=False).reshape(-1, 2)


def _numbers(directories: Sequence[Path]) -> Numbers:
    """The numbers in any pair, ascending, each once. What is new is gathered until it is as much as there is."""
    known, fresh, held = np.empty(0, dtype=np.int64), [np.empty(0, dtype=np.int64)], 0
    for directory in directories:
        for pairs in _pairs(directory):
            fresh.append(distinct(pairs.reshape(-1)))
            held += len(fresh[-1])
            if held > len(known) // 4:
                known, fresh, held = distinct(np.concatenate([known, *fresh])), [], 0
    return distinct(np.concatenate([known, *fresh]))


def _ranks_of(numbers: Numbers, runs: Sequence[Path]) -> NDArray[np.int64]:
    found = np.empty(len(numbers), dtype=np.int64)
    for run, directory in enumerate(runs):
        here = of_run(numbers, run)
        if here.start < here.stop:
            found[here] = np.load(directory / RANK, mmap_mode="r")[run_and_index(numbers[here])[1]]
    return found


def _places(ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each in the order of ranks."""
    order = np.argsort(ranks, kind="stable")
    ranks.sort()
    assert (ranks[1:] > ranks[:-1]).all(), "two documents of one rank"
    del ranks
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


def _unite_all(directory: Path, parents: NDArray[np.int64], numbers: Numbers, place: NDArray[np.int64]) -> None:
    for pairs in _pairs(directory):
        ends = place[_find(numbers, pairs.reshape(-1))].reshape(-1, 2)
        unite(parents, ends[:, 0], ends[:, 1])


def _find(numbers: Numbers, wanted: Numbers) -> NDArray[np.intp]:
    """Where each is in ascending numbers. In order they are found ten times as fast."""
    order = np.argsort(wanted)
    found = np.empty_like(order)
    found[order] = np.searchsorted(numbers, wanted[order])
    return found


def _is_root(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.equal(parents, np.arange(len(parents)))
