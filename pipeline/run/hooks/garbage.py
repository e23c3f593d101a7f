"""Collects cycles of Python objects at chosen steps, the same on all ranks, instead of at moments of their own.

Python's collector looks at all objects when it finds it is time; with millions of them (a model, a compiler's caches)
that takes up to a second, on one rank now and on another then, and every other rank waits.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

from pipeline.run.hooks.hook import Hook, HookContext


def make(context: HookContext) -> Hook:
    """Makes the hook, which leaves the collector as it was when the attempt ends."""
    here = context.here
    return here.stack.enter_context(GarbageCollector(here.run.config.run.gc_every))


class GarbageCollector(Hook):
    """A context manager in which cycles are collected by `after_step` alone.

    Args:
        every: steps between collections; 0 leaves them to Python.
    """

    def __init__(self, every: int) -> None:
        self._every, self._was_enabled = every, False

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        if self._every:
            gc.collect()
            gc.freeze()  # what is there by now stays: it is not looked at again
            gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._every:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collects cycles after every `every`-th step."""
        if self._every and step % self._every == 0:
            gc.collect()
