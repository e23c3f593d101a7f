"""Data that a run passes over, listed step by step: what is bad comes once, and what is good is not lost."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.skips import NO_SKIPS, Skip, Skips


def data_steps(skips: Skips, first: int, last: int) -> list[int]:
    return [skips.data_step(step) for step in range(first, last + 1)]


def test_a_skip_after_the_checkpoint_is_dropped_on_rollback() -> None:
    skips = Skips((Skip(11, 5),))
    assert data_steps(skips, 5, 13) == [5, 6, 7, 8, 9, 10, 16, 17, 18]
    # back behind the skip, as when the newer checkpoint is damaged: up to data step 18 all is passed over, and no more
    again = skips.past(13, since=5)
    assert data_steps(again, 4, 16) == [4, 5, *range(19, 30)]
    assert again.plain() == [[6, 13]]


def test_a_skip_from_the_same_or_an_older_checkpoint_is_kept() -> None:
    skips = Skips((Skip(4, 2), Skip(11, 5)))
    assert data_steps(skips.past(12, since=10), 2, 13) == [2, 3, *range(6, 13), 20, 21, 22]
    assert data_steps(skips.past(12, since=7), 2, 13) == [2, 3, *range(6, 10), *range(20, 26)]


@pytest.mark.parametrize("seed", range(20))
def test_after_any_rollbacks_all_data_is_seen_except_what_was_skipped(seed: int) -> None:
    draw = np.random.default_rng(seed)
    skips, done = NO_SKIPS, 0
    for _ in range(8):
        bad = done + int(draw.integers(1, 7))
        since = int(draw.integers(0, bad))  # any checkpoint before it
        seen, worst = data_steps(skips, 1, since), skips.data_step(bad)
        skips, done = skips.past(bad, since=since), since
        assert data_steps(skips, 1, since) == seen
        assert data_steps(skips, since + 1, since + 50) == list(range(worst + 1, worst + 51))
