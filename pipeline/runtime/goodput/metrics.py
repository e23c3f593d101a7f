"""Reads a run's `metrics.jsonl` for its status and goodput: only rows appended since the last read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from foundation.foreign_json import json_row
from pipeline.runtime.metrics.journal import NAME, newest_figures
from pipeline.runtime.metrics.sinks import TASK, JournalRow
from pipeline.runtime.metrics.time_sums import SumsByAttempt
from pipeline.runtime.metrics.times import seconds_of

_NOTABLE = frozenset({"rollback", "fault", "checkpoint_failed", "replicas", "non_finite", "spike", "exchange_failed"})
"""Events that a person should look at."""
_RECENT = 200
"""Number of steps over which the speed of a run is measured."""


@dataclass
class Metrics:
    """Sums over the rows of a run. A resume has removed the rows of the steps that it repeats: each step counts once.

    Attributes:
        step: the newest row of a step; {"step": 0} before the first.
        evaluation: the newest row of an evaluation; empty before the first.
        tasks: task -> its newest figures.
        recent: (step, seconds since the epoch, tokens so far) of the newest steps.
        sums: seconds by category, one sum for each attempt that has rows.
        checkpoints: step of a checkpoint -> time when it was written, in seconds since the epoch.
        shares: the newest event of balanced shares; empty where shares are fixed.
        events: notable events, oldest first.
        exchange: the newest exchange with other islands; None in an ordinary run.
        first_time, last_time: times of the first and the last row, in seconds since the epoch; None without rows.
        damaged: number of damaged lines, which were skipped.
    """

    step: JournalRow = field(default_factory=lambda: {"step": 0})
    evaluation: JournalRow = field(default_factory=dict)
    tasks: dict[str, JournalRow] = field(default_factory=dict)
    recent: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    sums: SumsByAttempt = field(default_factory=SumsByAttempt)
    checkpoints: dict[int, float] = field(default_factory=dict)
    shares: dict[str, Any] = field(default_factory=dict)
    events: list[JournalRow] = field(default_factory=list)
    exchange: JournalRow | None = None
    first_time: float | None = None
    last_time: float | None = None
    damaged: int = 0


class MetricsReader:
    """Reads a growing `metrics.jsonl`; begins anew when a resume has replaced the file.

    Args:
        run_dir: the run's directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path, self._offset, self._inode, self.metrics = run_dir / NAME, 0, -1, Metrics()

    def read(self) -> Metrics:
        """Reads the sums over all rows so far; leaves a partial last line for the next read."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return self.metrics
        with file:
            found = self._path.stat()
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset, self.metrics = found.st_ino, 0, Metrics()
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                _add(self.metrics, line)
        return self.metrics


def _add(metrics: Metrics, line: bytes) -> None:
    row = json_row(line) or {}
    try:
        kind, step = row["kind"], int(row["step"])
    except (ValueError, TypeError, KeyError):
        metrics.damaged += 1
        return
    metrics.sums.add(row)
    time = seconds_of(row.get("time"))
    if time is not None:
        metrics.first_time = time if metrics.first_time is None else metrics.first_time
        metrics.last_time = time
    if kind == "step":
        metrics.step = row
        if time is not None:
            metrics.recent.append((step, time, int(row.get("tokens") or step)))
    elif kind == "eval":
        metrics.evaluation = row
    elif str(kind).startswith(TASK):
        metrics.tasks |= newest_figures([row])
    elif kind == "event":
        _add_event(metrics, row, step, time)


def _add_event(metrics: Metrics, row: JournalRow, step: int, time: float | None) -> None:
    event = row.get("event")
    if event == "checkpoint" and time is not None:
        metrics.checkpoints[step] = time
    if event == "exchange":
        metrics.exchange = row
    if event == "shares":
        metrics.shares = row
    if event in _NOTABLE or row.get("lost"):
        metrics.events.append(row)


def seconds_left(metrics: Metrics, *, steps: int | None, tokens: int | None = None) -> float | None:
    """Estimates a run's remaining seconds, evaluations and checkpoints included; None where unknown so far.

    It uses the wall-clock time of the last steps, without breaks (restarts) of more than ten times the median.

    Args:
        metrics: the newest steps.
        steps: steps of the whole run; None where unknown.
        tokens: tokens of the whole run, to which time is proportional where steps differ (stages, a batch ramp).
    """
    recent = list(metrics.recent)
    laps = [
        (later[1] - earlier[1], later[2] - earlier[2]) for earlier, later in pairwise(recent) if later[0] > earlier[0]
    ]
    if steps is None or not laps:
        return None
    median = sorted(seconds for seconds, _ in laps)[len(laps) // 2]
    kept = [lap for lap in laps if lap[0] <= 10 * median + 1]
    seconds = sum(lap[0] for lap in kept)
    if tokens is not None and (seen := sum(lap[1] for lap in kept)) > 0:
        return max(0, tokens - int(metrics.step["tokens"])) * seconds / seen
    return max(0, steps - int(metrics.step["step"])) * seconds / len(kept)
