"""Law 1: which window of which dataset is global sample i, as a pure function of (sizes, weights, seed, i).

World size, batch split, workers and restarts do not enter; the data state of a run is the number of samples consumed.

Two steps, both O(1) per sample:

1. Blend. The weights are rounded to counts in a repeating block of `BLOCK` samples, and each source's turns are spread
   evenly over the block. So sample i belongs to one source and is that source's k-th sample.
2. Shuffle. Sample k of a source with n windows is in epoch k // n; each epoch is its own permutation of the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


class SampleOrder:
    """The order of a run's samples.

    Args:
        windows: number of windows of each source, each at least 1.
        weights: share of each source, relative.
        seed: the run's seed.

    Raises:
        DataError: a source is empty, or its weight is too small to be given one sample in `BLOCK`.
    """

    def __init__(self, windows: Sequence[int], *, weights: Sequence[float], seed: int) -> None:
        if min(windows) < 1:
            raise DataError(
                f"source {windows.index(0)} holds not one whole sample\n  try: a shorter data.sequence_length"
            )
        self.windows = np.asarray(windows, dtype=np.int64)
        self.seed = seed
        self.counts = _counts(np.asarray(weights, dtype=np.float64))
        if self.counts.min() < 1:
            which = int(self.counts.argmin())
            raise DataError(f"source {which}: a weight below 1/{BLOCK} of the sum would never be drawn")
        self._source_at, self._turn_at = _interleave(self.counts)

    def place(self, samples: npt.ArrayLike) -> Place:
        """The place of global samples.

        Args:
            samples: int64 [n], counted from 0 over the whole run.
        """
        block, position = np.divmod(np.asarray(samples, dtype=np.int64), BLOCK)
        source = self._source_at[position]
        turn = block * self.counts[source] + self._turn_at[position]
        window = np.empty_like(turn)
        for s in np.unique(source):
            mine = source == s
            window[mine] = self._shuffled(int(s), turn[mine])
        return Place(source, window)

    def epochs(self, samples: int) -> list[float]:
        """How often each source has been seen through after `samples` samples."""
        share = self.counts / BLOCK
        return [float(samples * share[s] / n) for s, n in enumerate(self.windows)]

    def _shuffled(self, source: int, turn: I64) -> I64:
        size = int(self.windows[source])
        epoch, index = np.divmod(turn, size)
        present, which = np.unique(epoch, return_inverse=True)
        keys: U64 = np.array([derive_key(self.seed, "order", source, e) for e in present], dtype=np.uint64)
        return permute(index, size=size, key=keys[which])


def _counts(weights: npt.NDArray[np.float64]) -> I64:
    """Turns per block by the largest-remainder method; they sum to BLOCK."""
    exact = weights / weights.sum() * BLOCK
    counts: I64 = np.floor(exact).astype(np.int64)
    most_cut = np.argsort(-(exact - counts), kind="stable")[: BLOCK - int(counts.sum())]
    counts[most_cut] += 1
    return counts


def _interleave(counts: I64) -> tuple[I64, I64]:
    """Spreads each source's turns evenly: turn r of a source with c turns stands at (r + 1/2) / c of the block.

    Returns:
        (source int64 [BLOCK], turn int64 [BLOCK]) by position in the block; turns of a source rise.
    """
    source = np.repeat(np.arange(len(counts)), counts)
    turn = np.concatenate([np.arange(c) for c in counts])
    at = (turn + 0.5) / counts[source]
    by_position = np.lexsort((source, at))
    return source[by_position], turn[by_position]
