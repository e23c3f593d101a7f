"""Plans the shards of the splits: each shard has one source and one range of keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from data_prep.dedup.components import drops_path
from data_prep.formats.memory_map import map_array
from data_prep.formats.tokenfile import SPLITS
from data_prep.tasks.reduce import Shard
from data_prep.tasks.runs_reader import KEYS, Group, RunsReader
from data_prep.tasks.sorted_runs import Array, SortedRun
from foundation.directory import write_json

_FEW_DOCUMENTS = 256
"""Documents per shard below which a range of keys may be empty; the documents are then looked up."""


def plan_shards(kept: Array, memory: Array, reader: RunsReader, *, shard_tokens: int) -> list[Shard]:
    """Plans the shards of all splits, numbered within each split.

    Args:
        kept: int64 [sources, splits, 2 or more], number of kept documents and tokens.
        memory: int64 [sources, splits], bytes of memory for all data that is read (`memory_bytes`).
        reader: reader of all runs of the job; used only for groups of few documents.
        shard_tokens: approximate number of tokens per shard.
    """
    shards: list[Shard] = []
    for number, split in enumerate(SPLITS):
        index = 0
        for source in range(len(kept)):
            documents, total = kept[source, number, :2].tolist()
            if not documents:
                continue
            parts = min(max(1, -(-total // shard_tokens)), documents)
            bounds = [KEYS * i // parts for i in range(parts + 1)]
            few = documents < _FEW_DOCUMENTS * parts
            non_empty = _non_empty((number, source), bounds, reader) if few else np.ones(parts, np.bool_)
            about = total // parts, int(memory[source, number]) // parts
            for i in np.flatnonzero(non_empty).tolist():
                shards.append(Shard(split, index, source, bounds[i], bounds[i + 1], *about))
                index += 1
    return shards


def dropped_counts(runs: Sequence[Path], drops: Path, *, shape: tuple[int, ...], cache: Path) -> Array:
    """Counts documents, tokens and bytes that deduplication drops: int64 [sources, splits, 3].

    Args:
        cache: file that keeps the counts for later calls, if this process may write it.
    """
    if cache.is_file():
        return np.array(json.loads(cache.read_text()), np.int64)
    counts = np.zeros(shape, np.int64)
    for i, path in enumerate(runs):
        dropped = SortedRun.open(path, whole=True).documents[np.load(drops_path(drops, i)) != 0]
        for column, values in enumerate((1, dropped["tokens"], dropped["bytes"])):
            np.add.at(counts[:, :, column], (dropped["source"], dropped["split"]), values)
    with suppress(OSError):
        write_json(cache, counts.tolist())
    return counts


def _non_empty(group: Group, bounds: list[int], reader: RunsReader) -> Array:
    """bool [ranges]: whether any kept document of the group has its key in the range."""
    found = np.zeros(len(bounds) - 1, np.bool_)
    for i, path in enumerate(reader.runs):
        run = SortedRun.open(path, whole=True)
        if group not in run.groups:
            continue
        first, end = run.groups[group]
        keys = run.documents["key"][first:end]
        if reader.drops is not None:
            keys = keys[map_array(drops_path(reader.drops, i))[first:end] == 0]
        cuts = np.searchsorted(keys, np.array(bounds[1:-1], np.uint64))
        found |= np.diff(np.concatenate([[0], cuts, [len(keys)]])) > 0
    return found
