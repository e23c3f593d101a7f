"""Reduce: the map outputs of a split, in task order, cut into shards of about equal size and merged.

Seen as one long row of tokens, a split is cut every `shard_tokens`; a document goes to the shard in which it starts. So
a shard holds `shard_tokens` give or take a document, and none straddles two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.tasks.base import Counts, Report, plain_errors, scratch_path
from data_prep.tasks.map import read_text_bytes
from data_prep.tokenfile import Slice, TokenFile, merge, shard_name, with_suffix
from headrace.directory import write_json


@dataclass(frozen=True)
class ReduceTask:
    """Writes shard `index` of `split` from `slices` of map outputs to `out/SPLIT/`, then its `marker`."""

    split: str
    index: int
    slices: list[Slice]
    dtype: str
    out: Path
    marker: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"reduce task {self.split}/{shard_name(self.index)}"

    def run(self, report: Report) -> dict[str, Any]:
        """See `Task.run`."""
        if self.marker.is_file():
            done: dict[str, Any] = json.loads(self.marker.read_text())
            return done
        with plain_errors(self.name):
            final = self.out / self.split / shard_name(self.index)
            scratch = scratch_path(self.marker)
            try:
                sums = merge(self.slices, scratch, dtype=self.dtype)
                done = _counts(self, scratch, sums)
                for suffix in sums:
                    with_suffix(scratch, suffix).rename(with_suffix(final, suffix))
            finally:
                for suffix in (".bin", ".idx"):
                    with_suffix(scratch, suffix).unlink(missing_ok=True)
            write_json(self.marker, done)
        report(Counts(tokens=done["tokens"], documents=done["documents"]))
        return done


def plan_shards(directories: Sequence[Path], *, split: str, shard_tokens: int) -> list[list[Slice]]:
    """The slices of each shard of a split, in order. Shards into which no document falls do not exist."""
    cuts = groupby(_cuts(directories, split, shard_tokens), key=lambda cut: cut[0])
    return [[part for _, part in same_shard] for _, same_shard in cuts]


def _cuts(directories: Sequence[Path], split: str, shard_tokens: int) -> Iterator[tuple[int, Slice]]:
    """Yields (number of the piece of the row, documents of one map output that start in it)."""
    position = 0
    for directory in directories:
        source = TokenFile.open(directory / split)
        ends = position + np.cumsum(source.sequence_lengths, dtype=np.int64)
        if len(ends):
            starts = np.concatenate([[position], ends[:-1]]) // shard_tokens
            bounds = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(starts)]
            for first, end in pairwise(bounds):
                yield int(starts[first]), Slice(directory / split, first, end)
            position = int(ends[-1])
        source.close()


def _counts(task: ReduceTask, prefix: Path, sums: dict[str, str]) -> dict[str, Any]:
    merged = TokenFile.open(prefix)
    sizes = (read_text_bytes(part.prefix.parent, task.split)[part.first : part.end].sum() for part in task.slices)
    entry = {"documents": merged.documents, "tokens": len(merged.tokens), "bytes": int(sum(sizes))}
    merged.close()
    return {**entry, "name": shard_name(task.index), "sha256": sums}
