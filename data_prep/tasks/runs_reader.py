"""Reads a range of keys of one group from many sorted runs and merges it in order, for merge and reduce tasks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.components import drops_path
from data_prep.formats.memory_map import map_array
from data_prep.tasks.sorted_runs import DOCUMENT, Array, SortedRun

KEYS = 1 << 64
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES = 16 << 20, 64 << 20
_READ_BYTES_PER_RUN = 1 << 20


_DOCUMENT_BYTES = 400
"""Memory of a document besides its tokens: its metadata twice, a view of its tokens, its bounds as Python integers."""

Group = tuple[int, int]
"""Numbers of a split and of a source."""


def memory_bytes(tokens: Array | int, documents: Array | int, *, dtype: str, masked: bool) -> Array | int:
    """Bytes of memory that tokens and documents take during the merge."""
    return tokens * (np.dtype(dtype).itemsize + masked) + documents * _DOCUMENT_BYTES


@dataclass(frozen=True)
class GroupContent:
    """Contents of the runs for one group and range of keys.

    Attributes:
        memory: bytes of memory during the merge (`memory_bytes`).
        runs: numbers of the runs that may contain documents of the group.
    """

    memory: int
    runs: Sequence[int]


@dataclass(frozen=True)
class DocumentRange:
    """The documents of a range of keys, in order.

    Attributes:
        documents: `DOCUMENT` [n]; `start` has no meaning.
        ids, mask: bytes of each document's tokens and loss mask; `mask` is empty in jobs without one.
    """

    documents: Array
    ids: list[memoryview]
    mask: list[memoryview]


@dataclass(frozen=True)
class RunsReader:
    """Reads the documents of a (split, source) and a range of keys from runs, except those dropped as duplicates.

    Memory: about `_MAX_BUFFER_BYTES`, see `memory_bytes`.

    Args:
        runs: directories of the runs.
        first: number of the first of these runs in the job.
        drops: directory of the `ComponentsTask` with the decisions for each run; None if nothing is dropped.
        dtype: dtype of the token ids.
        masked: whether there is a loss mask.
    """

    runs: Sequence[Path]
    first: int
    drops: Path | None
    dtype: str
    masked: bool

    def contents(self, low: int, high: int) -> dict[Group, GroupContent]:
        """Finds the contents of the runs with keys in [low, high), by group, in the order of groups."""
        memory: Counter[Group] = Counter()
        runs: defaultdict[Group, list[int]] = defaultdict(list)
        for i, path in enumerate(self.runs):
            run = SortedRun.open(path)
            for group in run.groups:
                first, end = run.find_range(group, low, high)
                if first < end:
                    last = run.documents[end - 1]
                    tokens = int(last["start"] + last["tokens"] - run.documents["start"][first])
                    memory[group] += int(memory_bytes(tokens, end - first, dtype=self.dtype, masked=self.masked))
                    runs[group].append(i)
        return {group: GroupContent(memory[group], runs[group]) for group in sorted(runs)}

    def ranges(self, group: Group, low: int, high: int, content: GroupContent) -> Iterator[DocumentRange]:
        """Yields the documents of a group with keys in [low, high), in ranges that fit into the buffer.

        Args:
            content: approximate memory of the documents, and the runs that may contain some of them.
        """
        buffer = _TokenBuffer(np.dtype(self.dtype), masked=self.masked)
        parts = max(1, -(-content.memory // self._buffer_bytes()))
        for i in range(parts):
            bounds = low + (high - low) * i // parts, low + (high - low) * (i + 1) // parts
            slices = list(self._read_slices(group, *bounds, content.runs, buffer))
            slice_of, documents = _merge(slices)
            ids = _views([part.ids for part in slices], slice_of, documents)
            mask = _views([part.mask for part in slices], slice_of, documents) if self.masked else []
            yield DocumentRange(documents, ids, mask)

    def _buffer_bytes(self) -> int:
        """Size of the buffer: small, unless the reads of a single run would get too small."""
        return min(max(len(self.runs) * _READ_BYTES_PER_RUN, _MIN_BUFFER_BYTES), _MAX_BUFFER_BYTES)

    def _read_slices(
        self, group: Group, low: int, high: int, runs: Sequence[int], buffer: _TokenBuffer
    ) -> Iterator[_RunSlice]:
        """Yields the kept documents of each run in the range."""
        found = list[tuple[int, SortedRun, int]]()
        for i in runs:
            run = SortedRun.open(self.runs[i])
            first, end = run.find_range(group, low, high)
            if first < end:  # copied: the memory map can be closed
                found.append((i, replace(run, documents=np.array(run.documents[first:end])), first))
        buffer.reset(sum(int(run.documents["tokens"].sum()) for _, run, _ in found))
        for i, run, first in found:
            documents = run.documents
            ids, mask = buffer.read(run, documents)
            run.verify(documents, first, ids, mask)
            documents["start"] -= documents["start"][0]
            if self.drops is not None:
                drops = map_array(drops_path(self.drops, self.first + i))
                documents = documents[drops[first : first + len(documents)] == 0]
            yield _RunSlice(documents, ids, mask)


class _TokenBuffer:
    """Memory for the ids of a range, and their loss mask; reused for every range."""

    def __init__(self, dtype: np.dtype[Any], *, masked: bool) -> None:
        self._ids, self._mask, self._masked, self._used = np.empty(0, dtype), np.empty(0, np.uint8), masked, 0

    def reset(self, tokens: int) -> None:
        """Empties the buffer and makes room for `tokens` tokens."""
        self._used = 0
        if tokens > len(self._ids):
            self._ids = np.empty(tokens, self._ids.dtype)
            self._mask = np.empty(tokens if self._masked else 0, np.uint8)

    def read(self, run: SortedRun, documents: Array) -> tuple[Array, Array]:
        """Reads the ids of consecutive documents of a run, and their loss mask; returns views of the buffer."""
        first, self._used = self._used, self._used + int(documents["tokens"].sum())
        ids, mask = self._ids[first : self._used], self._mask[first : self._used]
        run.read_tokens(documents, ids)
        if self._masked:
            run.read_mask(documents, mask)
        return ids, mask


@dataclass(frozen=True, slots=True)
class _RunSlice:
    """Consecutive tokens of a run, and the kept documents in them.

    `documents` is `DOCUMENT` [n], with `start` relative to `ids`; `mask` is as long as the ids.
    """

    documents: Array
    ids: Array
    mask: Array


def _merge(slices: list[_RunSlice]) -> tuple[list[int], Array]:
    """Merges the slices by key: returns the number of each document's slice, and `DOCUMENT` [n]."""
    documents = np.concatenate([np.empty(0, DOCUMENT), *(part.documents for part in slices)])
    slice_of = np.repeat(np.arange(len(slices)), [len(part.documents) for part in slices])
    order = np.lexsort((documents["rank"], documents["key"]))
    return slice_of[order].tolist(), documents[order]


def _views(values: list[Array], slice_of: list[int], documents: Array) -> list[memoryview]:
    """Views of each document's values in its slice, in order."""
    if not values:
        return []
    views, size = [part.view(np.uint8).data for part in values], values[0].itemsize
    starts = (documents["start"] * size).tolist()
    ends = ((documents["start"] + documents["tokens"]) * size).tolist()
    return [views[part][start:end] for part, start, end in zip(slice_of, starts, ends, strict=True)]
