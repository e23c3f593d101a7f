"""Law 1: which window of which dataset is global sample i, as a pure function of (sizes, weights, seed, i).

World size, batch split, workers and restarts do not enter; the data state of a run is the number of samples consumed.

Two steps, the first O(log sources) per sample, the second O(1):

1. Blend. The sources are the leaves of a binary tree. Of the first n samples at a node round(n x share) have gone to
   its left, for every n: turns are spread evenly, and what is drawn in a whole run is right to a few samples. So sample
   i belongs to one source and is that source's k-th sample. Weights may change at given samples (a curriculum): each
   stage has a tree of its own and goes on counting where the one before ended.
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
"""Shares at a node are parts of this: after so many samples their rounding is worth half a sample."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleLocation:
    """Where samples come from: `source` int64 [n] (number in the blend) and `window` int64 [n] (number within it)."""

    source: I64
    window: I64


@dataclass(frozen=True)
class MixtureStage:
    """From sample `start` on, `weights` hold: one for each source; a source with weight 0 is not drawn from."""

    start: int
    weights: tuple[float, ...]


class SampleOrder:
    """The order of a run's samples.

    Args:
        windows: number of windows of each source, each at least 1.
        weights: share of each source, relative, at least one above 0. A weight above 0 is never too small to be drawn
            at some time.
        seed: the run's seed.
        later: stages with other weights, in rising order.

    Raises:
        DataError: a source is empty.
    """

    def __init__(
        self, windows: Sequence[int], *, weights: Sequence[float], seed: int, later: Sequence[MixtureStage] = ()
    ) -> None:
        if min(windows) < 1:
            raise DataError(
                f"source {windows.index(0)} holds not one whole sample\n  try: a shorter data.sequence_length"
            )
        self.windows = np.asarray(windows, dtype=np.int64)
        self.seed = seed
        stages = [MixtureStage(0, tuple(weights)), *later]
        self._starts = np.array([stage.start for stage in stages], dtype=np.int64)
        self._trees = [_tree(stage.weights) for stage in stages]
        # turns of each source before each stage
        self._before = [np.zeros(len(windows), dtype=np.int64)]
        for number, length in enumerate(np.diff(self._starts).tolist()):
            self._before.append(self._before[-1] + self._turns(number, length))

    def place(self, samples: npt.ArrayLike) -> SampleLocation:
        """The place of global samples.

        Args:
            samples: int64 [n], counted from 0 over the whole run.
        """
        wanted = np.asarray(samples, dtype=np.int64)
        source, turn = np.empty_like(wanted), np.empty_like(wanted)
        stage = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(stage):
            mine = stage == number
            source[mine], turn[mine] = self._dealt(int(number), wanted[mine] - self._starts[number])
        window = np.empty_like(turn)
        for s in np.unique(source):
            mine = source == s
            window[mine] = self._shuffled(int(s), turn[mine])
        return SampleLocation(source, window)

    def drawn(self, samples: int) -> I64:
        """How many of the first `samples` samples are each source's: int64 [sources]."""
        stage = int(np.searchsorted(self._starts, samples, side="right")) - 1
        return self._before[stage] + self._turns(stage, samples - int(self._starts[stage]))

    def epochs(self, samples: int) -> list[float]:
        """How often each source has been seen through after `samples` samples."""
        return [float(share) for share in self.drawn(samples) / self.windows]

    def _dealt(self, stage: int, samples: I64) -> tuple[I64, I64]:
        """Source and turn of samples, counted from the stage's first."""
        node, turn = np.zeros_like(samples), samples
        for shares in self._trees[stage]:
            share = shares[node]
            before = _to_left(turn, share)
            right = _to_left(turn + 1, share) == before
            node, turn = 2 * node + right, np.where(right, turn - before, before)
        return node, self._before[stage][node] + turn

    def _turns(self, stage: int, samples: int) -> I64:
        """Turns of each source in the first samples of a stage: int64 [sources]."""
        turns = np.array([samples], dtype=np.int64)
        for shares in self._trees[stage]:
            left = _to_left(turns, shares)
            turns = np.stack([left, turns - left], axis=1).ravel()
        return turns[: self.windows.size]

    def _shuffled(self, source: int, turn: I64) -> I64:
        size = int(self.windows[source])
        epoch, index = np.divmod(turn, size)
        present, which = np.unique(epoch, return_inverse=True)
        keys: U64 = np.array([derive_key(self.seed, "order", source, e) for e in present], dtype=np.uint64)
        return permute(index, size=size, key=keys[which])


def _tree(weights: Sequence[float]) -> list[U64]:
    """What share of each node's samples goes to its left, from the root down: uint64 [2^depth] each, in 2^-32."""
    assert min(weights) >= 0.0 < sum(weights), weights
    depth = (len(weights) - 1).bit_length()
    sums = np.zeros(1 << depth, dtype=np.float64)
    sums[: len(weights)] = weights
    levels: list[U64] = []
    for _ in range(depth):
        left, right = sums[::2], sums[1::2]
        sums = left + right
        share = np.rint(np.divide(left, sums, out=np.zeros_like(sums), where=sums > 0) * _ONE)
        # what is not nothing gets a turn, and leaves one to the other side
        share = np.clip(share, left > 0, np.where(right > 0, _ONE - 1, _ONE))
        levels.insert(0, share.astype(np.uint64))
    return levels


def _to_left(samples: I64, share: U64) -> I64:
    """round(samples x share / 2^32), a half upwards: int64 [n]. In two parts, of which neither exceeds 64 bits."""
    whole, rest = np.divmod(samples.astype(np.uint64), np.uint64(_ONE))
    part: I64 = (whole * share + (rest * share + np.uint64(_ONE // 2)) // np.uint64(_ONE)).astype(np.int64)
    return part
