"""Checkpoints by time: one rank's clock decides, so all ranks save at the same step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.config.sections.run import RunSection
from pipeline.run.checkpoint_interval import AutoInterval, IntervalDecision, make_interval, saves_before

DEFAULT_MINUTES = 30.0
"""Minutes between checkpoints where the config sets none: a failure loses no more. A save copies to host memory."""


def minutes_of(section: RunSection) -> float:
    """Returns the largest number of minutes between two checkpoints; 0 for no checkpoints by time."""
    default = DEFAULT_MINUTES if section.checkpoint_every is None else 0.0
    return default if section.checkpoint_minutes is None else section.checkpoint_minutes


class CheckpointTimer:
    """Tells when the interval since the last checkpoint, or since the start, is over.

    Args:
        section: the config's `run`.
        decides: whether this rank's clock decides; true on one rank only.
        interval: decides the interval where the config leaves it open (`run.checkpoint_every` "auto");
            `run.checkpoint_minutes` is then an upper bound.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        section: RunSection,
        *,
        decides: bool,
        interval: AutoInterval | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._minutes, self._decides, self._interval, self._clock = minutes_of(section), decides, interval, clock
        self._last = clock()

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due; False on all ranks except the deciding one."""
        return self._decides and self._clock() - self._last >= self._seconds

    @property
    def _seconds(self) -> float:
        at_most = self._minutes * 60 or math.inf
        return at_most if self._interval is None else min(at_most, self._interval.period_s)

    def restart(self) -> None:
        """Counts from now on: a checkpoint has begun."""
        self._last = self._clock()

    def saved(self, *, waited_s: float, seconds: float) -> IntervalDecision | None:
        """Takes the times of a finished checkpoint.

        Args:
            waited_s: seconds for which training waited for the checkpoint.
            seconds: seconds from the beginning of the checkpoint to its commit.

        Returns:
            A new interval, on the rank that decides; None where it stays.
        """
        if self._interval is None or not self._decides:
            return None
        return self._interval.measured(blocking_s=waited_s, save_s=seconds - waited_s)


def make_timer(section: RunSection, run_dir: Path, *, nodes: int, decides: bool) -> CheckpointTimer:
    """Makes the timer of a rank; "auto" begins with the times of earlier saves.

    Args:
        section: the config's `run`.
        run_dir: the run's directory, whose journal has the earlier saves.
        decides: whether this rank's clock decides; true on one rank only.
    """
    interval = make_interval(section, nodes=nodes)
    timer = CheckpointTimer(section, decides=decides, interval=interval)
    for waited, background in saves_before(run_dir) if interval and decides else ():
        timer.saved(waited_s=waited, seconds=waited + background)
    return timer
