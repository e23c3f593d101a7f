"""Cutting splits into shards: each of one source and of a range of keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from data_prep.dedup.components import drops_of
from data_prep.runs import Array, Run
from data_prep.tasks.gather import KEYS
from data_prep.tasks.reduce import Shard
from data_prep.tokenfile import SPLITS
from headrace.directory import write_json

_FEW = 256
"""Documents per shard below which a shard may come out empty: then they are counted."""


def plan_shards(
    tokens: Array, documents: Array, runs: Sequence[Path], drops: Path | None, *, shard_tokens: int
) -> list[Shard]:
    """The shards of all splits, numbered within each.

    Args:
        shard_tokens: about how many each holds.
        tokens, documents: int64 [sources, splits], how many are kept.
        runs, drops: see `ReduceTask`; only looked at where documents are few.
    """
    shards: list[Shard] = []
    for number, split in enumerate(SPLITS):
        index = 0
        for source in range(len(tokens)):
            total, kept = int(tokens[source, number]), int(documents[source, number])
            pieces = min(max(1, -(-total // shard_tokens)), max(1, kept))
            bounds = [KEYS * i // pieces for i in range(pieces + 1)]
            few = kept < _FEW * pieces
            filled = _filled((number, source), bounds, runs, drops) if few else np.ones(pieces, np.bool_)
            for i in np.flatnonzero(filled).tolist():
                shards.append(Shard(split, index, source, bounds[i], bounds[i + 1], total // pieces))
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
        gone = Run.open(path, whole=True).documents[np.load(drops_of(drops, i)) != 0]
        for column, values in enumerate((1, gone["tokens"], gone["bytes"])):
            np.add.at(counts[:, :, column], (gone["source"], gone["split"]), values)
    with suppress(OSError):
        write_json(cache, counts.tolist())
    return counts


def _filled(group: tuple[int, int], bounds: list[int], runs: Sequence[Path], drops: Path | None) -> Array:
    """bool [ranges]: whether any document has its key in each range."""
    found = np.zeros(len(bounds) - 1, np.bool_)
    for i, path in enumerate(runs):
        run = Run.open(path, whole=True)
        if group not in run.groups:
            continue
        first, end = run.groups[group]
        keys = run.documents["key"][first:end]
        if drops is not None:
            keys = keys[np.load(drops_of(drops, i), mmap_mode="r")[first:end] == 0]
        cuts = np.searchsorted(keys, np.array(bounds[1:-1], np.uint64))
        found |= np.diff(np.concatenate([[0], cuts, [len(keys)]])) > 0
    return found
