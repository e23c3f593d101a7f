"""Sample order: the source and window of global sample i, as a pure function of (sizes, mixing weights, seed, i).

The order does not depend on world size, batch split, workers or restarts (law 1), so the data state of a run is the
number of samples consumed.

The order is computed in two steps. The mixture (`weighted_sources`) determines the source of sample i, and that it is
the source's k-th sample. The shuffle then computes, in O(1), the window of that sample. Sample k of a source with n
windows is in epoch k // n; each epoch is another permutation of the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foundation.errors import DataError
from pipeline.data.permutation import U64, derive_key, permute
from pipeline.data.weighted_sources import I64, MixtureStage, WeightedSources


@dataclass(frozen=True)
class SampleLocation:
    """Locations of samples: `source` int64 [n] (index in the mixture) and `window` int64 [n] (index in the source)."""

    source: I64
    window: I64


@dataclass(frozen=True)
class OrderStart:
    """Where the order of one stage of a run begins.

    Attributes:
        first: global number of the stage's first sample.
        keys: number of each source in the key of its shuffle; another number gives another shuffle.
        drawn: samples of each source, in the same shuffle, that earlier stages have drawn.
    """

    first: int
    keys: tuple[int, ...]
    drawn: tuple[int, ...]


class SampleOrder:
    """The order of a run's samples, or of those of one stage.

    Args:
        windows: number of windows of each source, each at least 1.
        weights: relative mixing weight of each source, at least one above 0. Every source above 0 is drawn eventually.
        seed: seed of the run.
        later: stages with other weights, in ascending order.
        start: where the order begins; None for the beginning of a run.

    Raises:
        DataError: a source is empty.
    """

    def __init__(
        self,
        windows: Sequence[int],
        *,
        weights: Sequence[float],
        seed: int,
        later: Sequence[MixtureStage] = (),
        start: OrderStart | None = None,
    ) -> None:
        if min(windows) < 1:
            raise DataError(
                f"source {windows.index(0)} holds less than one sample\n  try: a shorter data.sequence_length"
            )
        self.windows = np.asarray(windows, dtype=np.int64)
        self.seed = seed
        self.start = start or OrderStart(0, tuple(range(len(windows))), (0,) * len(windows))
        self._sources = WeightedSources([MixtureStage(0, tuple(weights)), *later])

    def locate(self, samples: npt.ArrayLike) -> SampleLocation:
        """Returns the locations of global samples.

        Args:
            samples: int64 [n], counted from 0 over the whole run.
        """
        source, nth = self._sources.locate(np.asarray(samples, dtype=np.int64) - self.start.first)
        window = np.empty_like(nth)
        for s in np.unique(source):
            mine = source == s
            window[mine] = self._window_of(int(s), nth[mine] + self.start.drawn[s])
        return SampleLocation(source, window)

    def samples_drawn(self, samples: int) -> I64:
        """Returns the number of samples drawn from each source among the first `samples` from the order's start on.

        Returns:
            int64 [sources].
        """
        return self._sources.samples_drawn(samples)

    def samples_seen(self, samples: int) -> I64:
        """Returns what `samples_drawn` does, plus the samples that earlier stages have drawn: int64 [sources]."""
        return self.samples_drawn(samples) + np.asarray(self.start.drawn, dtype=np.int64)

    def epochs(self, samples: int) -> list[float]:
        """Epochs of each source after `samples` samples from the order's start on, those of earlier stages included."""
        return [float(share) for share in self.samples_seen(samples) / self.windows]

    def _window_of(self, source: int, nth: I64) -> I64:
        size = int(self.windows[source])
        epoch, index = np.divmod(nth, size)
        present, which = np.unique(epoch, return_inverse=True)
        keys: U64 = np.array(
            [derive_key(self.seed, "order", self.start.keys[source], e) for e in present], dtype=np.uint64
        )
        return permute(index, size=size, key=keys[which])
