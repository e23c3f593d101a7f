"""The mixture: the source of global sample i, in proportion to mixing weights, in O(log sources).

The sources are the leaves of a binary tree. For every n, round(n x share) of the first n samples at a node belong to
its left child. Each source is therefore spread evenly, and its number of samples in a whole run is exact to a few. So
sample i belongs to one source and is that source's k-th sample. Weights may change at given samples (a curriculum):
each stage has its own tree and continues the counts of the previous stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.data.permutation import U64

_ONE = 1 << 32
"""Denominator of the shares at a node: after 2^32 samples, a share's rounding error is half a sample."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MixtureStage:
    """Stage of a curriculum: from sample `start` on, `weights` apply, one per source; weight 0 draws nothing."""

    start: int
    weights: tuple[float, ...]


class WeightedSources:
    """The sources that the samples of a run are drawn from.

    Args:
        stages: stages in ascending order, the first from sample 0; each has at least one weight above 0. Every source
            above 0 is drawn eventually.
    """

    def __init__(self, stages: Sequence[MixtureStage]) -> None:
        self._sources = len(stages[0].weights)
        self._starts = np.array([stage.start for stage in stages], dtype=np.int64)
        self._trees = [_tree(stage.weights) for stage in stages]
        # samples of each source before each stage
        self._before = [np.zeros(self._sources, dtype=np.int64)]
        for number, length in enumerate(np.diff(self._starts).tolist()):
            self._before.append(self._before[-1] + self._drawn_in(number, length))

    def locate(self, samples: I64) -> tuple[I64, I64]:
        """Returns the source of each global sample, and its index among that source's samples: int64 [n] each."""
        source, nth = np.empty_like(samples), np.empty_like(samples)
        stage = np.searchsorted(self._starts, samples, side="right") - 1
        for number in np.unique(stage):
            mine = stage == number
            source[mine], nth[mine] = self._locate_in(int(number), samples[mine] - self._starts[number])
        return source, nth

    def samples_drawn(self, samples: int) -> I64:
        """Returns the number of samples drawn from each source among the first `samples`: int64 [sources]."""
        stage = int(np.searchsorted(self._starts, samples, side="right")) - 1
        return self._before[stage] + self._drawn_in(stage, samples - int(self._starts[stage]))

    def _locate_in(self, stage: int, samples: I64) -> tuple[I64, I64]:
        """Locates samples as `locate` does; their numbers count from the stage's first sample."""
        node, nth = np.zeros_like(samples), samples
        for shares in self._trees[stage]:
            share = shares[node]
            before = _to_left(nth, share)
            right = _to_left(nth + 1, share) == before
            node, nth = 2 * node + right, np.where(right, nth - before, before)
        return node, self._before[stage][node] + nth

    def _drawn_in(self, stage: int, samples: int) -> I64:
        """Samples of each source among the first `samples` of a stage: int64 [sources]."""
        counts = np.array([samples], dtype=np.int64)
        for shares in self._trees[stage]:
            left = _to_left(counts, shares)
            counts = np.stack([left, counts - left], axis=1).ravel()
        return counts[: self._sources]


def _tree(weights: Sequence[float]) -> list[U64]:
    """Share of each node's samples that goes to its left child, in units of 2^-32: uint64 [2^level] for each level."""
    assert min(weights) >= 0.0 < sum(weights), weights
    depth = (len(weights) - 1).bit_length()
    sums = np.zeros(1 << depth, dtype=np.float64)
    sums[: len(weights)] = weights
    levels: list[U64] = []
    for _ in range(depth):
        left, right = sums[::2], sums[1::2]
        sums = left + right
        share = np.rint(np.divide(left, sums, out=np.zeros_like(sums), where=sums > 0) * _ONE)
        # a share above 0 is at least one unit, and leaves at least one unit to the other child
        share = np.clip(share, left > 0, np.where(right > 0, _ONE - 1, _ONE))
        levels.insert(0, share.astype(np.uint64))
    return levels


def _to_left(samples: I64, share: U64) -> I64:
    """Returns round(samples x share / 2^32), halves up: int64 [n]. Computed in two parts that each fit 64 bits."""
    whole, rest = np.divmod(samples.astype(np.uint64), np.uint64(_ONE))
    part: I64 = (whole * share + (rest * share + np.uint64(_ONE // 2)) // np.uint64(_ONE)).astype(np.int64)
    return part
