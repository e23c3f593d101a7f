"""Connected components of the candidate pairs: they decide which exact and near duplicates are dropped.

Documents connected by pairs, over any number of steps, are duplicates of each other, and the document with the smallest
rank is kept. Where clusters are verified, `verify` drops only documents similar to a kept one. This is the only
deduplication task whose memory grows with the input: 60 MB, a bit for each document, and 27 bytes for each document in
a pair, or 52 where clusters are verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.config.dedup import NearSection
from data_prep.dedup.document_tasks import RANK, SIGNATURES
from data_prep.dedup.table import PAIRS, RUN_BITS, Numbers, run_and_index, run_slice, sorted_unique
from data_prep.dedup.verify import Signatures, find_kept
from data_prep.formats.memory_map import map_array
from data_prep.task import Counts, DirectoryTask, Report

KEEP, EXACT_DUPLICATE, NEAR_DUPLICATE, SEEN = 0, 1, 2, 3
_CHUNK = 1 << 18  # pairs at a time: 4 MiB


@dataclass(frozen=True)
class ComponentsTask(DirectoryTask):
    """Computes the connected components of all pairs and writes the decision for each document.

    For each run it writes `drops_path(directory, run)`, uint8[documents], with `KEEP`, `EXACT_DUPLICATE`,
    `NEAR_DUPLICATE`, or `SEEN` for a document of an earlier corpus, which is not written. The marker counts `exact` and
    `near` duplicates and `seen` documents. `sizes`[k] clusters have 2^k up to 2^(k + 1) - 1 documents. For the
    `largest` clusters the marker has the size, and the run and index of the kept document.

    Args:
        exact, near: directories with pairs of exact and of near duplicates.
        runs: the runs' directories, in the order that numbers the documents of the pairs.
        section: rules for near duplicates; None: documents connected by pairs are duplicates.
    """

    name = "dedup components"
    exact: tuple[Path, ...]
    near: tuple[Path, ...]
    runs: Sequence[Path]
    directory: Path
    section: NearSection | None = None

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        numbers, reasons, clusters = self._find_duplicates(scratch)
        counts = np.zeros(SEEN + 1, dtype=np.int64)
        for run, directory in enumerate(self.runs):
            of_run, rank = run_slice(numbers, run), map_array(directory / RANK)
            drops = np.full(len(rank), KEEP, dtype=np.uint8)
            drops[run_and_index(numbers[of_run])[1]] = reasons[of_run]
            drops[rank < 0] = SEEN
            np.save(drops_path(scratch, run), drops)
            counts += np.bincount(drops, minlength=len(counts))
        done = {"exact": int(counts[EXACT_DUPLICATE]), "near": int(counts[NEAR_DUPLICATE])}
        report(Counts(dropped=Counter({f"{kind} copy": count for kind, count in done.items()})))
        return done | {"seen": int(counts[SEEN])} | clusters

    def _find_duplicates(self, scratch: Path) -> tuple[Numbers, NDArray[np.uint8], dict[str, Any]]:
        """Decides on all documents in a pair; returns their numbers, ascending, with decisions and cluster sizes."""
        paired = _PairedDocuments([*self.exact, *self.near], self.runs)
        ranks = _ranks_of(paired, self.runs)
        position, seen = _positions(ranks), int((ranks < 0).sum())
        del ranks
        numbers = paired.numbers()  # computed again, not kept beside the ranks
        parents = np.arange(len(numbers), dtype=position.dtype)
        for directory in self.exact:
            _union_all(directory, parents, numbers, position)
        kept_for = _roots(parents)
        exact = _are_attached(kept_for)
        for directory in self.near:
            _union_all(directory, parents, numbers, position)
        near = _roots(parents)
        del parents
        if self.section is not None and self.section.clusters == "verified":
            near = self._verified(near, exact, numbers, position, scratch, seen=seen)
        reasons = np.full(len(numbers), KEEP, dtype=np.uint8)
        reasons[_are_attached(near)] = NEAR_DUPLICATE
        reasons[exact] = EXACT_DUPLICATE
        kept_for = near[kept_for]
        del near
        return numbers, reasons[position], _sizes(kept_for, numbers, position)

    def _verified(
        self,
        roots: NDArray[Any],
        exact: NDArray[np.bool_],
        numbers: Numbers,
        position: NDArray[Any],
        scratch: Path,
        *,
        seen: int,
    ) -> NDArray[Any]:
        """Position of the document kept in place of each document; for an exact duplicate its own position.

        Args:
            seen: number of documents of an earlier corpus; their positions come first.
        """
        assert self.section is not None
        order = np.flatnonzero(~exact).astype(roots.dtype)
        order = order[np.argsort(roots[order], kind="stable")]
        place = np.full(len(roots), -1, dtype=roots.dtype)
        place[order] = np.arange(len(order), dtype=roots.dtype)
        signatures = self._signatures(scratch / SIGNATURES, numbers, place, position, len(order))
        del place
        kept_for = np.arange(len(roots), dtype=roots.dtype)
        kept_for[order] = order[find_kept(roots[order], signatures, seen=order < seen, section=self.section)]
        (scratch / SIGNATURES).unlink()
        return kept_for

    def _signatures(
        self, path: Path, numbers: Numbers, place: NDArray[Any], position: NDArray[Any], count: int
    ) -> Signatures:
        """Collects signatures, in the order of `place` (-1 leaves one out), in a file, which may exceed memory.

        Each run is opened once.
        """
        assert self.section is not None
        shape = (max(1, count), self.section.slots)  # an empty file cannot be mapped
        found: Signatures = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        for run, directory in enumerate(self.runs):
            of_run = run_slice(numbers, run)
            places = place[position[of_run]]
            if (placed := places >= 0).any():
                index = run_and_index(numbers[of_run])[1][placed]
                found[places[placed]] = map_array(directory / SIGNATURES)[index]
        return found


_LARGEST = 5


def _roots(parents: NDArray[Any]) -> NDArray[Any]:
    """The root of each item, in a new array."""
    found = np.empty_like(parents)
    for part in _slices(len(parents)):
        found[part] = find_roots(parents, np.arange(part.start, part.stop))
    return found


def _are_attached(roots: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray(roots != np.arange(len(roots), dtype=roots.dtype))


def _sizes(kept_for: NDArray[Any], numbers: Numbers, position: NDArray[Any]) -> dict[str, Any]:
    """Sizes of the clusters for the marker of `ComponentsTask`."""
    sizes, bins, largest = np.zeros_like(kept_for), np.zeros(64, dtype=np.int64), list[int]()
    for part in _slices(len(kept_for)):
        np.add.at(sizes, kept_for[part], 1)
    for part in _slices(len(kept_for)):
        many = sizes[part][sizes[part] > 1]
        bins += np.bincount(np.frexp(many)[1] - 1, minlength=len(bins))
        largest += (part.start + np.argsort(-sizes[part], kind="stable")[:_LARGEST]).tolist()
    largest = [at for at in sorted(largest, key=lambda at: (-sizes[at], at))[:_LARGEST] if sizes[at] > 1]
    of = {at: numbers[np.flatnonzero(position == at)[0]] for at in largest}
    return {
        "sizes": np.trim_zeros(bins, "b").tolist(),
        "largest": [[int(sizes[at]), *map(int, run_and_index(of[at]))] for at in largest],
    }


def drops_path(directory: Path, run: int) -> Path:
    """Path of a finished `ComponentsTask`'s decisions for the documents of a run."""
    return directory / f"run-{run:06d}.npy"


def union_pairs(parents: NDArray[Any], first: NDArray[Any], second: NDArray[Any]) -> None:
    """Union-find: unites the trees of items `first[i]` and `second[i]`, for all i, in place.

    `parents`, integers [items], is a forest in which no item's parent is greater than the item: the root of a tree is
    its smallest item. In every round, each greater root of a pair is attached to the smallest root paired with it. The
    number of trees left to unite at least halves.
    """
    while len(first):
        first, second = find_roots(parents, first), find_roots(parents, second)
        apart = first != second
        low, high = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        np.minimum.at(parents, high, low)
        first, second = low, high


def find_roots(parents: NDArray[Any], items: NDArray[Any]) -> NDArray[Any]:
    """Finds the root of each item's tree, and attaches the items directly to it (path compression)."""
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
    """Set of the documents in any pair: a bit for each document of all runs.

    Args:
        directories: directories with pairs.
        runs: directories of the runs.
    """

    def __init__(self, directories: Sequence[Path], runs: Sequence[Path]) -> None:
        documents = np.array([len(map_array(each / RANK)) for each in runs], dtype=np.int64)
        self._first = np.concatenate([[0], np.cumsum(-(-documents // 8))])  # first byte of each run
        self._bits = np.zeros(int(self._first[-1]), dtype=np.uint8)
        for directory in directories:
            for pairs in _read_pairs(directory):
                run, index = run_and_index(sorted_unique(pairs.reshape(-1)))
                np.bitwise_or.at(
                    self._bits, self._first[run] + (index >> 3), np.left_shift(1, index & 7).astype(np.uint8)
                )

    def of_run(self, run: int) -> Numbers:
        """Indices of the set's documents in a run, ascending."""
        bits = self._bits[self._first[run] : self._first[run + 1]]
        return np.flatnonzero(np.unpackbits(bits, bitorder="little"))

    def numbers(self) -> Numbers:
        """Numbers of all documents in the set, ascending."""
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
    """Position of each rank in ascending order, as four-byte integers if they are large enough."""
    order = np.argsort(ranks)
    position = np.empty(len(order), dtype=np.int32 if len(order) < 1 << 31 else np.int64)
    for part in _slices(len(order)):
        after = order[part.start : part.stop + 1]
        assert (np.diff(ranks[after]) > 0).all(), "two documents of one rank"
        position[order[part]] = np.arange(part.start, part.stop, dtype=position.dtype)
    return position


def _slices(count: int) -> Iterator[slice]:
    """Yields slices that cover `count` items."""
    return (slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


def _union_all(directory: Path, parents: NDArray[Any], numbers: Numbers, position: NDArray[Any]) -> None:
    for pairs in _read_pairs(directory):
        ends = position[_index_of(numbers, pairs.reshape(-1))].reshape(-1, 2)
        union_pairs(parents, ends[:, 0], ends[:, 1])


def _index_of(numbers: Numbers, wanted: Numbers) -> NDArray[np.intp]:
    """Index of each wanted number among ascending numbers. Searching in ascending order is ten times as fast."""
    order = np.argsort(wanted)
    found = np.empty_like(order)
    found[order] = np.searchsorted(numbers, wanted[order])
    return found
