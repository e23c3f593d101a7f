"""Steps of a run whose batch sizes change: shares that are measured anew, and the batch sizes of a ramp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pipeline.config.batch import BatchSizes
from pipeline.data.loader import StepLoader
from pipeline.data.micro_batch import StepBatch


class CurrentBatch:
    """The batch sizes with which `DividedSteps` reads the next step; they may be replaced between steps.

    Args:
        sizes: batch sizes of the first steps.
    """

    def __init__(self, sizes: BatchSizes) -> None:
        self.sizes = sizes


class DividedSteps:
    """Iterates over steps as `StepLoader` does, in shares that may be replaced between steps.

    Batches prepared with the old shares are dropped; reading them again is cheap, since the page cache has the files.

    Args:
        load: function (batch sizes, (first, last) step) -> the loader of these steps.
        current: the batch sizes; several parts of a run (the rounds of islands) share one object.
        steps: (first, last) step, both included.
    """

    def __init__(
        self,
        load: Callable[[BatchSizes, tuple[int, int]], StepLoader],
        current: CurrentBatch,
        *,
        steps: tuple[int, int],
    ) -> None:
        self._load, self._current, self._steps = load, current, steps

    def __iter__(self) -> Iterator[StepBatch]:
        step, last = self._steps
        while step <= last:
            sizes = self._current.sizes
            for batch in self._load(sizes, (step, last)):
                yield batch
                step += 1
                if self._current.sizes is not sizes:
                    break


class JoinedSteps:
    """Iterates over the steps of several loaders, one after another: a batch ramp has one for each batch size.

    Args:
        loaders: functions that make a loader; each is called once the loader before it has ended.
    """

    def __init__(self, loaders: Sequence[Callable[[], StepLoader]]) -> None:
        self._loaders = loaders

    def __iter__(self) -> Iterator[StepBatch]:
        for load in self._loaders:
            yield from load()
