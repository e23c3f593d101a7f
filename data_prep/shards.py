"""Cutting splits into shards: each of one source and of a range of keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.runs import Array, Run
from data_prep.tasks.reduce import KEYS, Shard
from data_prep.tokenfile import SPLITS

_FEW = 256
"""Documents per shard below which a shard may come out empty: then they are counted."""


def plan_shards(tokens: Array, documents: Array, runs: Sequence[Path], *, shard_tokens: int) -> list[Shard]:
    """The shards of all splits, numbered within each.

    Args:
        tokens, documents: int64 [sources, splits], how many are kept.
        runs: of all map tasks; only looked at where documents are few.
    """
    shards: list[Shard] = []
    for number, split in enumerate(SPLITS):
        index = 0
        for source in range(len(tokens)):
            total, kept = int(tokens[source, number]), int(documents[source, number])
            pieces = min(max(1, -(-total // shard_tokens)), max(1, kept))
            bounds = [KEYS * i // pieces for i in range(pieces + 1)]
            filled = _filled((number, source), bounds, runs) if kept < _FEW * pieces else [kept > 0] * pieces
            for i in np.flatnonzero(filled).tolist():
                shards.append(Shard(split, index, source, bounds[i], bounds[i + 1], total // pieces))
                index += 1
    return shards


def _filled(group: tuple[int, int], bounds: list[int], runs: Sequence[Path]) -> list[bool]:
    """Whether any document has a key in each range."""
    found = np.zeros(len(bounds) - 1, np.bool_)
    for path in runs:
        run = Run.open(path)
        if group in run.groups:
            first, end = run.groups[group]
            cuts = np.searchsorted(run.documents["key"][first:end], np.array(bounds[1:-1], np.uint64))
            found |= np.diff(np.concatenate([[0], cuts, [end - first]])) > 0
    return found.tolist()
