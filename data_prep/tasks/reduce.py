"""Reduce: one shard, from the slice that every run has of it.

A shard is a range of keys of one source in one split. Keys are hashes, so shards of a source are of about equal size
and each is a random sample of it. Memory: `_MOST_HELD` bytes of tokens and 40 for each document of the shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.components import drops_of
from data_prep.maskfile import MASK, MaskWriter
from data_prep.runs import DOCUMENT, Array, Run
from data_prep.tasks.base import Counts, Report, plain_errors, scratch_path
from data_prep.tokenfile import SPLITS, TokenFileWriter, shard_name, with_suffix
from headrace.directory import write_json

KEYS = 1 << 64
_LEAST_HELD, _MOST_HELD = 16 << 20, 64 << 20
_READ_BYTES = 1 << 20
_LENGTH_BINS = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of a split: the documents of source number `source` with keys in [low, high).

    tokens: about how many.
    """

    split: str
    index: int
    source: int
    low: int
    high: int
    tokens: int


@dataclass(frozen=True)
class ReduceTask:
    """Writes a shard to `out/SPLIT/`, then its `marker`.

    Args:
        masked: whether tokens come with a loss mask, which then lies beside them as `.mask`.
        runs: of all map tasks, in order.
        drops: the directory of the `ComponentsTask` that says what is dropped of each run; None when nothing is.
    """

    shard: Shard
    runs: Sequence[Path]
    drops: Path | None
    dtype: str
    masked: bool
    out: Path
    marker: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"reduce task {self.shard.split}/{shard_name(self.shard.index)}"

    @property
    def final(self) -> Path:
        """See `Task.final`."""
        return self.marker

    @property
    def finished(self) -> bool:
        """See `Task.finished`."""
        return self.marker.is_file()

    def run(self, report: Report) -> dict[str, Any]:
        """See `Task.run`."""
        if self.marker.is_file():
            done: dict[str, Any] = json.loads(self.marker.read_text())
            return done
        with plain_errors(self.name):
            final = self.out / self.shard.split / shard_name(self.shard.index)
            scratch = scratch_path(self.marker)
            try:
                done = self._write(scratch, report)
                for suffix in done["sha256"]:
                    with_suffix(scratch, suffix).rename(with_suffix(final, suffix))
            finally:
                for suffix in (".bin", ".idx", MASK):
                    with_suffix(scratch, suffix).unlink(missing_ok=True)
            write_json(self.marker, done)
        return done

    def _write(self, scratch: Path, report: Report) -> dict[str, Any]:
        text_bytes, lengths = 0, np.zeros(_LENGTH_BINS, np.int64)
        with ExitStack() as stack:
            writer = stack.enter_context(TokenFileWriter(scratch, dtype=self.dtype))
            mask = stack.enter_context(MaskWriter(scratch)) if self.masked else None
            held = _Held(np.dtype(self.dtype), masked=self.masked)
            for low, high in self._ranges():
                slices = list(self._slices(low, high, held))
                runs, documents = _in_order(slices)
                writer.append_pieces(_pieces([part.ids for part in slices], runs, documents), documents["tokens"])
                if mask is not None:
                    mask.append(_pieces([part.mask for part in slices], runs, documents))
                text_bytes += int(documents["bytes"].sum())
                lengths += np.bincount(_length_bin(documents["tokens"]), minlength=_LENGTH_BINS)
                report(Counts(tokens=int(documents["tokens"].sum()), documents=len(documents)))
            sums = writer.close() | (mask.close() if mask is not None else {})
        entry = {"documents": int(lengths.sum()), "tokens": writer.tokens, "bytes": text_bytes}
        name = {"name": shard_name(self.shard.index), "source": self.shard.source}
        return {**name, **entry, "lengths": lengths.tolist(), "sha256": sums}

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """The shard's keys, in ranges that fit into memory; small ones, unless what is read of a run gets too small."""
        held = min(max(len(self.runs) * _READ_BYTES, _LEAST_HELD), _MOST_HELD)
        parts = max(1, -(-self.shard.tokens * np.dtype(self.dtype).itemsize // held))
        span = self.shard.high - self.shard.low
        for i in range(parts):
            yield self.shard.low + span * i // parts, self.shard.low + span * (i + 1) // parts

    def _slices(self, low: int, high: int, held: _Held) -> Iterator[_Slice]:
        """Of each run, what belongs to a range and is kept."""
        group, found = (SPLITS.index(self.shard.split), self.shard.source), list[tuple[int, Run, int]]()
        for i, path in enumerate(self.runs):
            run = Run.open(path)
            first, end = run.between(group, low, high)
            if first < end:  # copied: the map itself is not kept
                found.append((i, replace(run, documents=np.array(run.documents[first:end])), first))
        held.make_room(sum(int(run.documents["tokens"].sum()) for _, run, _ in found))
        for i, run, first in found:
            documents = run.documents
            ids, mask = held.read(run, documents)
            documents["start"] -= documents["start"][0]
            if self.drops is not None:
                kept = np.load(drops_of(self.drops, i), mmap_mode="r")[first : first + len(documents)] == 0
                documents = documents[kept]
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

    def read(self, run: Run, documents: Array) -> tuple[Array, Array]:
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


def _length_bin(tokens: Array) -> Array:
    """The bin of a length: k for 2^k up to 2^(k + 1) - 1 tokens."""
    return np.frexp(tokens.astype(np.float64))[1] - 1
