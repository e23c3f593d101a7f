"""The reduce task: writes one shard of the token files, merged from its slices of all sorted runs.

A shard is a range of keys of one source in one split. Keys are hashes: the shards of a source have about equal sizes,
and each is a random sample of it. Memory: see `RunsReader`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.maskfile import MASK, MaskWriter
from data_prep.formats.tokenfile import SPLITS, TokenFileWriter, shard_name, with_suffix
from data_prep.task import (
    Counts,
    Marker,
    Report,
    os_errors_as_data_errors,
    read_marker_file,
    scratch_path,
    with_checksum,
)
from data_prep.tasks.runs_reader import GroupContent, RunsReader
from data_prep.tasks.sorted_runs import Array
from foundation.directory import sync, write_json
from foundation.storage import patiently, same_object, upload

LENGTH_BINS = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of a split: the documents of source number `source` with keys in [low, high).

    `tokens` is an approximate number; `memory` is an approximate size in bytes during the merge (`memory_bytes`).
    """

    split: str
    index: int
    source: int
    low: int
    high: int
    tokens: int
    memory: int


@dataclass(frozen=True)
class ReduceTask:
    """Writes a shard to `out/SPLIT/`, with a loss mask as `.mask` if the job has one, then its `marker`.

    Args:
        reader: reader of the runs that may contain documents of the shard.
        url: URL of an output in an object store, to which the shard's files are uploaded instead of being kept on this
            host; files uploaded by a killed attempt are not uploaded again. None for a local output.
    """

    shard: Shard
    reader: RunsReader
    out: Path
    marker: Path
    url: str | None = None

    @property
    def name(self) -> str:
        """Implements `Task.name`."""
        return f"reduce task {self.shard.split}/{shard_name(self.shard.index)}"

    @property
    def tokens(self) -> int:
        """Approximate number of tokens of the shard."""
        return self.shard.tokens

    @property
    def finished(self) -> bool:
        """Implements `Task.finished`."""
        return self.marker.is_file()

    def run(self, report: Report) -> Marker:
        """Implements `Task.run`."""
        if (done := read_marker_file(self.marker, remove=self.marker)) is not None:
            return done
        with os_errors_as_data_errors(self.name):
            scratch = scratch_path(self.marker)
            try:
                done = self._write(scratch, report)
                done |= self._move(scratch, done["sha256"])
            finally:
                for suffix in (".bin", ".idx", MASK):
                    with_suffix(scratch, suffix).unlink(missing_ok=True)
            write_json(self.marker, with_checksum(done))
        return done

    def _move(self, scratch: Path, sums: Mapping[str, str]) -> Marker:
        """Renames the files to their final names, or uploads them; returns further entries of the marker."""
        name = f"{self.shard.split}/{shard_name(self.shard.index)}"
        if self.url is None:
            for suffix in sums:
                with_suffix(scratch, suffix).rename(with_suffix(self.out / name, suffix))
            sync(self.out / self.shard.split)  # after a power failure too, a marker has its files
            return {}
        sizes = {suffix: with_suffix(scratch, suffix).stat().st_size for suffix in sums}
        for suffix, sha256 in sums.items():
            there = f"{self.url}/{name}{suffix}"
            if not patiently(partial(same_object, there, size=sizes[suffix], sha256=sha256)):
                patiently(partial(upload, with_suffix(scratch, suffix), there))
        return {"sizes": sizes}

    def _write(self, scratch: Path, report: Report) -> Marker:
        text_bytes, lengths = 0, np.zeros(LENGTH_BINS, np.int64)
        with ExitStack() as stack:
            writer = stack.enter_context(TokenFileWriter(scratch, dtype=self.reader.dtype))
            mask = stack.enter_context(MaskWriter(scratch)) if self.reader.masked else None
            shard = self.shard
            group, content = (
                (SPLITS.index(shard.split), shard.source),
                GroupContent(shard.memory, range(len(self.reader.runs))),
            )
            for part in self.reader.ranges(group, shard.low, shard.high, content):
                documents = part.documents
                writer.append_pieces(part.ids, documents["tokens"])
                if mask is not None:
                    mask.append(part.mask)
                text_bytes += int(documents["bytes"].sum())
                lengths += length_histogram(documents["tokens"])
                report(Counts(tokens=int(documents["tokens"].sum()), documents=len(documents)))
            sums = writer.close() | (mask.close() if mask is not None else {})
        entry = {"documents": int(lengths.sum()), "tokens": writer.tokens, "bytes": text_bytes}
        name = {"name": shard_name(self.shard.index), "source": self.shard.source}
        return {**name, **entry, "lengths": lengths.tolist(), "sha256": sums}


def length_histogram(tokens: Array) -> Array:
    """Counts documents with 2^k up to 2^(k + 1) - 1 tokens, int64 [LENGTH_BINS], from their lengths [documents]."""
    return np.bincount(np.frexp(tokens.astype(np.float64))[1] - 1, minlength=LENGTH_BINS)


def sum_shards(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums documents, tokens and bytes; `lengths[k]`: number of documents with 2^k up to 2^(k + 1) - 1 tokens."""
    sums: dict[str, Any] = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    lengths = [sum(column) for column in zip(*(shard["lengths"] for shard in shards), strict=True)]
    while lengths and not lengths[-1]:
        lengths.pop()
    return sums | {"lengths": lengths}
