"""Checkpoints by time: every so many minutes of one rank's clock, so that all ranks save at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.config.schema import RunSection

DEFAULT_MINUTES = 30.0
"""Of a run that says nothing about checkpoints: what it loses at most. Saving costs a copy to host memory each time."""


class CheckpointTimer:
    """Tells when the minutes since the last checkpoint, or since the start, are over.

    Args:
        section: the config's `run`.
        decides: whether this rank's clock counts, which is so on one rank only.
        clock: seconds.
    """

    def __init__(self, section: RunSection, *, decides: bool, clock: Callable[[], float] = time.monotonic) -> None:
        default = DEFAULT_MINUTES if section.checkpoint_every is None else 0.0
        minutes = default if section.checkpoint_minutes is None else section.checkpoint_minutes
        self._seconds, self._clock = minutes * 60 if decides else 0.0, clock
        self._last = clock()

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due; False on all ranks but the one that decides."""
        return bool(self._seconds) and self._clock() - self._last >= self._seconds

    def restart(self) -> None:
        """Counts from now on: a checkpoint has begun."""
        self._last = self._clock()
