"""Gathering a range of keys of one group out of many runs, in order: what merge and reduce tasks have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.components import drops_path
from data_prep.tasks.sorted_runs import DOCUMENT, Array, SortedRun

KEYS = 1 << 64
_LEAST_HELD, _MOST_HELD = 16 << 20, 64 << 20
_READ_BYTES = 1 << 20


_DOCUMENT_BYTES = 400
"""That a document takes besides its tokens: its facts twice, a view of its tokens, its bounds as numbers."""

Group = tuple[int, int]
"""Numbers of a split and of a source."""


def memory_of(tokens: Array | int, documents: Array | int, *, dtype: str, masked: bool) -> Array | int:
    """Bytes of memory that so many tokens and documents take while they are gathered."""
    return tokens * (np.dtype(dtype).itemsize + masked) + documents * _DOCUMENT_BYTES


@dataclass(frozen=True)
class Content:
    """What runs hold of a group and a range of keys. memory: see `memory_of`. runs: numbers of those that hold some."""

    memory: int
    runs: Sequence[int]


@dataclass(frozen=True)
class Gathered:
    """Documents of a range of keys, in order.

    Attributes:
        documents: `DOCUMENT` [n]; `start` means nothing.
        ids, mask: the bytes of each one's tokens and of their mask; no mask where the job has none.
    """

    documents: Array
    ids: list[memoryview]
    mask: list[memoryview]


@dataclass(frozen=True)
class Gather:
    """Reads out of runs what belongs to a (split, source) and a range of keys, but for what is dropped.

    Memory: about `_MOST_HELD` bytes, see `memory_of`.

    Args:
        runs: the runs. first: the number of the first of them in the job.
        drops: the directory of the `ComponentsTask` that says what is dropped of each run; None when nothing is.
        dtype: of the ids. masked: whether there is a mask beside them.
    """

    runs: Sequence[Path]
    first: int
    drops: Path | None
    dtype: str
    masked: bool

    def contents(self, low: int, high: int) -> dict[Group, Content]:
        """What the runs hold with keys in [low, high), by group, in the order of groups."""
        memory: Counter[Group] = Counter()
        runs: defaultdict[Group, list[int]] = defaultdict(list)
        for i, path in enumerate(self.runs):
            run = SortedRun.open(path)
            for group in run.groups:
                first, end = run.between(group, low, high)
                if first < end:
                    last = run.documents[end - 1]
                    tokens = int(last["start"] + last["tokens"] - run.documents["start"][first])
                    memory[group] += int(memory_of(tokens, end - first, dtype=self.dtype, masked=self.masked))
                    runs[group].append(i)
        return {group: Content(memory[group], runs[group]) for group in sorted(runs)}

    def ranges(self, group: Group, low: int, high: int, content: Content) -> Iterator[Gathered]:
        """Yields the documents of a group with keys in [low, high), by ranges that fit into memory.

        Args:
            content: about how much memory they take, and numbers of the runs that may hold some.
        """
        held = _Held(np.dtype(self.dtype), masked=self.masked)
        parts = max(1, -(-content.memory // self._held_bytes()))
        for i in range(parts):
            bounds = low + (high - low) * i // parts, low + (high - low) * (i + 1) // parts
            slices = list(self._slices(group, *bounds, content.runs, held))
            which, documents = _in_order(slices)
            ids = _pieces([part.ids for part in slices], which, documents)
            mask = _pieces([part.mask for part in slices], which, documents) if self.masked else []
            yield Gathered(documents, ids, mask)

    def _held_bytes(self) -> int:
        """Small ranges, unless what is read of a run gets too small."""
        return min(max(len(self.runs) * _READ_BYTES, _LEAST_HELD), _MOST_HELD)

    def _slices(self, group: Group, low: int, high: int, runs: Sequence[int], held: _Held) -> Iterator[_Slice]:
        """Of each run, what belongs to a range and is kept."""
        found = list[tuple[int, SortedRun, int]]()
        for i in runs:
            run = SortedRun.open(self.runs[i])
            first, end = run.between(group, low, high)
            if first < end:  # copied: the map itself is not kept
                found.append((i, replace(run, documents=np.array(run.documents[first:end])), first))
        held.make_room(sum(int(run.documents["tokens"].sum()) for _, run, _ in found))
        for i, run, first in found:
            documents = run.documents
            ids, mask = held.read(run, documents)
            documents["start"] -= documents["start"][0]
            if self.drops is not None:
                drops = np.load(drops_path(self.drops, self.first + i), mmap_mode="r")
                documents = documents[drops[first : first + len(documents)] == 0]
            yield _Slice(documents, ids, mask)


class _Held:
    """Memory for the ids of a range, and their mask: one piece, used for every range."""

    def __init__(self, dtype: np.dtype[Any], *, masked: bool) -> None:
        self._ids, self._mask, self._masked, self._used = np.empty(0, dtype), np.empty(0, np.uint8), masked, 0

    def make_room(self, tokens: int) -> None:
        """Forgets what it holds and has room for so many."""
        self._used = 0
        if tokens > len(self._ids):
            self._ids = np.empty(tokens, self._ids.dtype)
            self._mask = np.empty(tokens if self._masked else 0, np.uint8)

    def read(self, run: SortedRun, documents: Array) -> tuple[Array, Array]:
        """The ids of some documents of a run that follow one another, and their mask, as views."""
        first, self._used = self._used, self._used + int(documents["tokens"].sum())
        ids, mask = self._ids[first : self._used], self._mask[first : self._used]
        run.read_tokens(documents, ids)
        if self._masked:
            run.read_mask(documents, mask)
        return ids, mask


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of a run. documents: `DOCUMENT` [n], which may leave some of the values out; mask: as long as the ids."""

    documents: Array
    ids: Array
    mask: Array


def _in_order(slices: list[_Slice]) -> tuple[list[int], Array]:
    """The documents of all slices by their keys: the number of each one's slice, and `DOCUMENT` [n]."""
    documents = np.concatenate([np.empty(0, DOCUMENT), *(part.documents for part in slices)])
    which = np.repeat(np.arange(len(slices)), [len(part.documents) for part in slices])
    order = np.lexsort((documents["rank"], documents["key"]))
    return which[order].tolist(), documents[order]


def _pieces(values: list[Array], runs: list[int], documents: Array) -> list[memoryview]:
    """The bytes of each document, in order."""
    if not values:
        return []
    views, size = [part.view(np.uint8).data for part in values], values[0].itemsize
    starts = (documents["start"] * size).tolist()
    ends = ((documents["start"] + documents["tokens"]) * size).tolist()
    return [views[run][start:end] for run, start, end in zip(runs, starts, ends, strict=True)]
