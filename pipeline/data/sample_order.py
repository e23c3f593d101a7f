"""Sample order: the source and window of global sample i, as a pure function of (sizes, mixing weights, seed, i).

World size, batch split, workers and restarts do not enter (law 1); the data state of a run is the number of samples
consumed.

Two steps, the first O(log sources) per sample, the second O(1):

1. Mixture. The sources are the leaves of a binary tree. Of the first n samples at a node, round(n x share) belong to
   its left child, for every n: each source is spread evenly, and its samples in a whole run are exact to a few. So
   sample i belongs to one source and is that source's k-th sample. Weights may change at given samples (a curriculum):
   each stage has a tree of its own and continues the counts of the stage before.
2. Shuffle. Sample k of a source with n windows is in epoch k // n; each epoch is its own permutation of the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.base.errors import DataError
from pipeline.data.permutation import U64, derive_key, permute

_ONE = 1 << 32
"""Shares at a node are integers out of this: after so many samples their rounding error is half a sample."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleLocation:
    """Locations of samples: `source` int64 [n] (index in the mixture) and `window` int64 [n] (index in the source)."""

    source: I64
    window: I64


@dataclass(frozen=True)
class MixtureStage:
    """Stage of a curriculum: from sample `start` on, `weights` apply, one per source; 0 draws nothing from it."""

    start: int
    weights: tuple[float, ...]


class SampleOrder:
    """The order of a run's samples.

    Args:
        windows: number of windows of each source, each at least 1.
        weights: relative mixing weight of each source, at least one above 0. Any weight above 0 is drawn eventually.
        seed: seed of the run.
        later: stages with other weights, in ascending order.

    Raises:
        DataError: a source is empty.
    """

    def __init__(
        self, windows: Sequence[int], *, weights: Sequence[float], seed: int, later: Sequence[MixtureStage] = ()
    ) -> None:
        if min(windows) < 1:
            raise DataError(
                f"source {windows.index(0)} holds less than one sample\n  try: a shorter data.sequence_length"
            )
        self.windows = np.asarray(windows, dtype=np.int64)
        self.seed = seed
        stages = [MixtureStage(0, tuple(weights)), *later]
        self._starts = np.array([stage.start for stage in stages], dtype=np.int64)
        self._trees = [_tree(stage.weights) for stage in stages]
        # samples of each source before each stage
        self._before = [np.zeros(len(windows), dtype=np.int64)]
        for number, length in enumerate(np.diff(self._starts).tolist()):
            self._before.append(self._before[-1] + self._samples_per_source(number, length))

    def locate(self, samples: npt.ArrayLike) -> SampleLocation:
        """The locations of global samples.

        Args:
            samples: int64 [n], counted from 0 over the whole run.
        """
        wanted = np.asarray(samples, dtype=np.int64)
        source, nth = np.empty_like(wanted), np.empty_like(wanted)
        stage = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(stage):
            mine = stage == number
            source[mine], nth[mine] = self._source_of(int(number), wanted[mine] - self._starts[number])
        window = np.empty_like(nth)
        for s in np.unique(source):
            mine = source == s
            window[mine] = self._window_of(int(s), nth[mine])
        return SampleLocation(source, window)

    def samples_drawn(self, samples: int) -> I64:
        """Number of samples drawn from each source among the first `samples`: int64 [sources]."""
        stage = int(np.searchsorted(self._starts, samples, side="right")) - 1
        return self._before[stage] + self._samples_per_source(stage, samples - int(self._starts[stage]))

    def epochs(self, samples: int) -> list[float]:
        """Epochs of each source after `samples` samples."""
        return [float(share) for share in self.samples_drawn(samples) / self.windows]

    def _source_of(self, stage: int, samples: I64) -> tuple[I64, I64]:
        """Source of each sample, and its index among that source's samples; counted from the stage's first sample."""
        node, nth = np.zeros_like(samples), samples
        for shares in self._trees[stage]:
            share = shares[node]
            before = _to_left(nth, share)
            right = _to_left(nth + 1, share) == before
            node, nth = 2 * node + right, np.where(right, nth - before, before)
        return node, self._before[stage][node] + nth

    def _samples_per_source(self, stage: int, samples: int) -> I64:
        """Samples of each source among the first `samples` of a stage: int64 [sources]."""
        counts = np.array([samples], dtype=np.int64)
        for shares in self._trees[stage]:
            left = _to_left(counts, shares)
            counts = np.stack([left, counts - left], axis=1).ravel()
        return counts[: self.windows.size]

    def _window_of(self, source: int, nth: I64) -> I64:
        size = int(self.windows[source])
        epoch, index = np.divmod(nth, size)
        present, which = np.unique(epoch, return_inverse=True)
        keys: U64 = np.array([derive_key(self.seed, "order", source, e) for e in present], dtype=np.uint64)
        return permute(index, size=size, key=keys[which])


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
        # a share above 0 is at least one unit, and leaves at least one to the other side
        share = np.clip(share, left > 0, np.where(right > 0, _ONE - 1, _ONE))
        levels.insert(0, share.astype(np.uint64))
    return levels


def _to_left(samples: I64, share: U64) -> I64:
    """round(samples x share / 2^32), halves up: int64 [n]. Computed in two parts, neither of which exceeds 64 bits."""
    whole, rest = np.divmod(samples.astype(np.uint64), np.uint64(_ONE))
    part: I64 = (whole * share + (rest * share + np.uint64(_ONE // 2)) // np.uint64(_ONE)).astype(np.int64)
    return part
