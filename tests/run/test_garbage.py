"""Cycles of Python objects are collected at chosen steps, and at no other time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from pipeline.run.garbage import GarbageCollector


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that Python's collector has looked at, in order."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def forgotten() -> Callable[[], object]:
    """A weak reference to a cycle that nothing else refers to."""
    return weakref.ref(Node())


def fail(*, enabled: bool) -> None:
    """A step that fails, in which the collector must be off."""
    assert not enabled
    raise RuntimeError("a step")


def test_cycles_are_collected_at_multiples_of_the_chosen_steps_and_not_by_allocation(collections: list[int]) -> None:
    with GarbageCollector(3) as collector:
        collections.clear()
        for step in range(1, 8):
            cycle = forgotten()
            kept = [[] for _ in range(10 * gc.get_threshold()[0])]  # ten times what makes Python look by itself
            assert len(collections) == (step - 1) // 3, step
            collector.collect(step)
            assert (cycle() is None) == (step % 3 == 0)
            assert len(kept) == 10 * gc.get_threshold()[0]
        assert collections == [2, 2]  # whole collections, after steps 3 and 6


def test_what_was_there_before_is_not_looked_at_again_until_the_end() -> None:
    old = [Node() for _ in range(1000)]
    with GarbageCollector(1) as collector:
        before = weakref.ref(old[0])
        old.clear()
        collector.collect(1)
        assert before() is not None
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_pythons_own_collections_are_as_before_even_after_an_error(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="a step"), GarbageCollector(2):
            fail(enabled=gc.isenabled())
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_0_leaves_collections_to_python(collections: list[int]) -> None:
    with GarbageCollector(0) as collector:
        assert gc.isenabled()
        collections.clear()
        collector.collect(50)
        assert collections == []
        kept = [[] for _ in range(10 * gc.get_threshold()[0])]
        assert collections
        assert kept
