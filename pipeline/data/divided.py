"""The steps of a run in shares that change: every data-parallel rank's part is read anew from a step on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.config.batch import BatchSizes
from pipeline.data.loader import StepBatch, StepLoader


class DividedSteps:
    """Iterates over the steps of a run as `StepLoader` does, in shares that may be replaced between steps.

    What is prepared ahead in the shares before is dropped; the files are in the page cache then.

    Args:
        load: (batch sizes, (first, last) step) -> the loader of these steps.
        batch: the batch sizes at first.
        steps: (first, last) step, both included.
    """

    def __init__(
        self, load: Callable[[BatchSizes, tuple[int, int]], StepLoader], batch: BatchSizes, *, steps: tuple[int, int]
    ) -> None:
        self._load, self.batch, self._steps = load, batch, steps

    def __iter__(self) -> Iterator[StepBatch]:
        step, last = self._steps
        while step <= last:
            current = self.batch
            for batch in self._load(current, (step, last)):
                yield batch
                step += 1
                if self.batch is not current:
                    break
