"""Law 1: which window of which dataset is global sample i, as a pure function of (sizes, weights, seed, i).

World size, batch split, workers and restarts do not enter; the data state of a run is the number of samples consumed.

Two steps, both O(1) per sample:

1. Blend. The weights are rounded to counts in a repeating block of `BLOCK` samples, and each source's turns are spread
   evenly over the block. So sample i belongs to one source and is that source's k-th sample. Weights may change at
   given samples (a curriculum): each stage has blocks of its own and goes on counting where the one before ended.
2. Shuffle. Sample k of a source with n windows is in epoch k // n; each epoch is its own permutation of the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headrace.errors import DataError
from pipeline.data.permutation import U64, derive_key, permute

BLOCK = 1 << 16
"""Samples per blend block: weights are honoured to 1 part in 65,536."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """Where samples come from: `source` int64 [n] (number in the blend) and `window` int64 [n] (number within it)."""

    source: I64
    window: I64


@dataclass(frozen=True)
class Stage:
    """From sample `start` on, `weights` hold: one for each source; a source with weight 0 is not drawn from."""

    start: int
    weights: tuple[float, ...]


class SampleOrder:
    """The order of a run's samples.

    Args:
        windows: number of windows of each source, each at least 1.
        weights: share of each source, relative.
        seed: the run's seed.
        later: stages with other weights, in rising order.

    Raises:
        DataError: a source is empty, or its weight is too small to be given one sample in `BLOCK`.
    """

    def __init__(
        self, windows: Sequence[int], *, weights: Sequence[float], seed: int, later: Sequence[Stage] = ()
    ) -> None:
        if min(windows) < 1:
            raise DataError(
                f"source {windows.index(0)} holds not one whole sample\n  try: a shorter data.sequence_length"
            )
        self.windows = np.asarray(windows, dtype=np.int64)
        self.seed = seed
        stages = [Stage(0, tuple(weights)), *later]
        self._starts = np.array([stage.start for stage in stages], dtype=np.int64)
        self._counts = [_counts(stage.weights) for stage in stages]
        # turns of each source before each stage
        self._before = [np.zeros(len(windows), dtype=np.int64)]
        for number, length in enumerate(np.diff(self._starts).tolist()):
            self._before.append(self._before[-1] + _turns(self._counts[number], length))

    def place(self, samples: npt.ArrayLike) -> Place:
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
        return Place(source, window)

    def drawn(self, samples: int) -> I64:
        """How many of the first `samples` samples are each source's: int64 [sources]."""
        stage = int(np.searchsorted(self._starts, samples, side="right")) - 1
        return self._before[stage] + _turns(self._counts[stage], samples - int(self._starts[stage]))

    def epochs(self, samples: int) -> list[float]:
        """How often each source has been seen through after `samples` samples."""
        return [float(share) for share in self.drawn(samples) / self.windows]

    def _dealt(self, stage: int, samples: I64) -> tuple[I64, I64]:
        """Source and turn of samples, counted from the stage's first."""
        counts = self._counts[stage]
        source_at, turn_at = _interleave(counts)
        block, position = np.divmod(samples, BLOCK)
        source = source_at[position].astype(np.int64)
        return source, self._before[stage][source] + block * np.array(counts)[source] + turn_at[position]

    def _shuffled(self, source: int, turn: I64) -> I64:
        size = int(self.windows[source])
        epoch, index = np.divmod(turn, size)
        present, which = np.unique(epoch, return_inverse=True)
        keys: U64 = np.array([derive_key(self.seed, "order", source, e) for e in present], dtype=np.uint64)
        return permute(index, size=size, key=keys[which])


def _counts(weights: Sequence[float]) -> tuple[int, ...]:
    """Turns per block by the largest-remainder method; they sum to BLOCK."""
    given = np.asarray(weights, dtype=np.float64)
    exact = given / given.sum() * BLOCK
    counts: I64 = np.floor(exact).astype(np.int64)
    most_cut = np.argsort(-(exact - counts), kind="stable")[: BLOCK - int(counts.sum())]
    counts[most_cut] += 1
    for which in np.flatnonzero((counts < 1) & (given > 0)):
        raise DataError(f"source {which}: a weight below 1/{BLOCK} of the sum would never be drawn")
    return tuple(counts.tolist())


def _turns(counts: tuple[int, ...], samples: int) -> I64:
    """Turns of each source in the first samples of a stage: int64 [sources]."""
    blocks, rest = divmod(samples, BLOCK)
    source_at, _ = _interleave(counts)
    return blocks * np.array(counts) + np.bincount(source_at[:rest], minlength=len(counts))


@lru_cache(maxsize=8)
def _interleave(counts: tuple[int, ...]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Spreads each source's turns evenly: turn r of a source with c turns stands at (r + 1/2) / c of the block.

    Returns:
        (source int32 [BLOCK], turn int32 [BLOCK]) by position in the block; turns of a source rise.
    """
    source = np.repeat(np.arange(len(counts)), counts)
    turn = np.concatenate([np.arange(c) for c in counts])
    at = (turn + 0.5) / np.array(counts)[source]
    by_position = np.lexsort((source, at))
    return source[by_position].astype(np.int32), turn[by_position].astype(np.int32)
