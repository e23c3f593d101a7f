"""Cutting splits into shards: each of one source and of a range of keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from data_prep.dedup.components import drops_path
from data_prep.formats.tokenfile import SPLITS
from data_prep.tasks.reduce import Shard
from data_prep.tasks.runs_reader import KEYS, Group, RunsReader
from data_prep.tasks.sorted_runs import Array, SortedRun
from headrace.base.directory import write_json

_FEW = 256
"""Documents per shard below which a shard may come out empty: then they are counted."""


def plan_shards(kept: Array, memory: Array, reader: RunsReader, *, shard_tokens: int) -> list[Shard]:
    """The shards of all splits, numbered within each.

    Args:
        kept: int64 [sources, splits, 2 or more], how many documents and tokens are kept.
        memory: int64 [sources, splits], what all that is read takes in memory, see `memory_bytes`.
        reader: all of the job; only looked at where documents are few.
        shard_tokens: about how many each holds.
    """
    shards: list[Shard] = []
    for number, split in enumerate(SPLITS):
        index = 0
        for source in range(len(kept)):
            documents, total = kept[source, number, :2].tolist()
            if not documents:
                continue
            pieces = min(max(1, -(-total // shard_tokens)), documents)
            bounds = [KEYS * i // pieces for i in range(pieces + 1)]
            few = documents < _FEW * pieces
            filled = _filled((number, source), bounds, reader) if few else np.ones(pieces, np.bool_)
            about = total // pieces, int(memory[source, number]) // pieces
            for i in np.flatnonzero(filled).tolist():
                shards.append(Shard(split, index, source, bounds[i], bounds[i + 1], *about))
                index += 1
    return shards


def dropped_counts(runs: Sequence[Path], drops: Path, *, shape: tuple[int, ...], cache: Path) -> Array:
    """Documents, tokens and bytes that dedup drops: int64 [sources, splits, 3].

    Args:
        cache: where they are kept once they have been counted, if this process may write there.
    """
    if cache.is_file():
        return np.array(json.loads(cache.read_text()), np.int64)
    counts = np.zeros(shape, np.int64)
    for i, path in enumerate(runs):
        gone = SortedRun.open(path, whole=True).documents[np.load(drops_path(drops, i)) != 0]
        for column, values in enumerate((1, gone["tokens"], gone["bytes"])):
            np.add.at(counts[:, :, column], (gone["source"], gone["split"]), values)
    with suppress(OSError):
        write_json(cache, counts.tolist())
    return counts


def _filled(group: Group, bounds: list[int], reader: RunsReader) -> Array:
    """bool [ranges]: whether any document has its key in each range."""
    found = np.zeros(len(bounds) - 1, np.bool_)
    for i, path in enumerate(reader.runs):
        run = SortedRun.open(path, whole=True)
        if group not in run.groups:
            continue
        first, end = run.groups[group]
        keys = run.documents["key"][first:end]
        if reader.drops is not None:
            keys = keys[np.load(drops_path(reader.drops, i), mmap_mode="r")[first:end] == 0]
        cuts = np.searchsorted(keys, np.array(bounds[1:-1], np.uint64))
        found |= np.diff(np.concatenate([[0], cuts, [len(keys)]])) > 0
    return found
