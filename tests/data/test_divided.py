"""Steps in shares that change: what is replaced between two steps holds from the next one on, in later rounds too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.config.batch import BatchSizes
from pipeline.config.shares import Shares
from pipeline.data.divided import CurrentBatch, DividedSteps

EVEN, UNEVEN = Shares(((2,), (2,))), Shares(((3,), (1,)))


def test_new_shares_hold_from_the_next_step_on_and_in_the_next_round() -> None:
    def load(sizes: BatchSizes, steps: tuple[int, int]) -> Any:
        for step in range(steps[0], steps[1] + 1):
            yield step, sizes.shares.counts

    current = CurrentBatch(BatchSizes(4, 3, 1, 2, 8, (), EVEN))
    rounds: Iterator[Any] = (each for part in ((1, 3), (7, 8)) for each in DividedSteps(load, current, steps=part))
    found = []
    for step, counts in rounds:
        found.append((step, counts))
        if step == 2:
            current.sizes = current.sizes.with_shares(UNEVEN)
    assert found == [(1, (2, 2)), (2, (2, 2)), (3, (3, 1)), (7, (3, 1)), (8, (3, 1))]
