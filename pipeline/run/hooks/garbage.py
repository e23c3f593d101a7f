"""Collects cycles of Python objects at the same steps on all ranks, instead of whenever Python decides.

Python's collector traverses all objects at times of its own choice. With millions of objects (a model, a compiler's
caches) that takes up to a second, at different times on different ranks, and every other rank waits.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

from pipeline.run.hooks.hook import Hook, HookContext


def make(context: HookContext) -> Hook:
    """Makes the hook, which restores the collector when the attempt ends."""
    here = context.here
    return here.stack.enter_context(GarbageCollector(here.run.config.run.gc_every))


class GarbageCollector(Hook):
    """A context manager in which only `after_step` collects cycles.

    Args:
        every: steps between collections; 0 leaves them to Python.
    """

    def __init__(self, every: int) -> None:
        self._every, self._was_enabled = every, False

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        if self._every:
            gc.collect()
            gc.freeze()  # present objects stay, and are not traversed again
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
