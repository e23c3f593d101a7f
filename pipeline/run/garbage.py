"""Collects cycles of Python objects at chosen steps, the same on all ranks, instead of at moments of their own.

Python's collector looks at all objects when it finds it is time; with millions of them (a model, a compiler's caches)
that takes up to a second, on one rank now and on another then, and every other rank waits.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self


class GarbageCollector:
    """A context manager in which cycles are collected by `collect` alone.

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

    def collect(self, step: int) -> None:
        """Collects cycles after a step at which it is time."""
        if self._every and step % self._every == 0:
            gc.collect()
