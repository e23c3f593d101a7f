"""Cycles of Python objects are collected at chosen steps, the same on all ranks, and never else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pipeline.run.hooks.garbage import GarbageCollector


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def left_behind() -> weakref.ref[Cycle]:
    """A reference to a cycle that nothing else refers to."""
    return weakref.ref(Cycle())


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    """A failed test must not leave the collector disabled for those after it."""
    yield
    gc.unfreeze()
    gc.enable()


def test_a_cycle_lives_until_a_step_at_which_it_is_time() -> None:
    with GarbageCollector(every=3) as garbage:
        assert not gc.isenabled()
        cycle = left_behind()
        for step in (1, 2, 4, 5):
            garbage.after_step(step)
            assert cycle() is not None, step
        garbage.after_step(6)
        assert cycle() is None
    assert gc.isenabled()


def test_what_is_there_at_the_start_is_not_looked_at_again_until_the_end() -> None:
    with GarbageCollector(every=1) as garbage:
        frozen = gc.get_freeze_count()
        assert frozen > 0
        garbage.after_step(1)
        assert frozen - 100 < gc.get_freeze_count() <= frozen  # some may have died meanwhile, of their own
    assert gc.get_freeze_count() == 0


def test_0_leaves_collections_to_python() -> None:
    with GarbageCollector(every=0) as garbage:
        assert gc.isenabled()
        cycle = left_behind()
        garbage.after_step(1)
        assert cycle() is not None
    gc.collect()
    assert cycle() is None


def test_a_collector_that_was_disabled_before_stays_so_and_an_error_ends_it_as_well() -> None:
    gc.disable()
    with pytest.raises(ValueError, match="a step failed"), GarbageCollector(every=2):
        raise ValueError("a step failed")
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0
