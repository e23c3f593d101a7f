"""Sums over rows of `metrics.jsonl`: seconds by category, for each attempt of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.runtime.metrics.sinks import HELD_OUT, TASK
from pipeline.runtime.metrics.times import seconds_of

_BEGINS = frozenset({"started", "resumed"})
"""Events with which the rows of an attempt begin."""


@dataclass
class TimeSums:
    """Sums over the rows of one attempt.

    Attributes:
        since, until: times of the first and the last row, since the epoch; None without rows.
        steps: number of steps.
        step_s: seconds of the steps, from report to report, without checkpoints and evaluations.
        data_wait_s: part of `step_s` in which rank 0 waited for a batch.
        compile_s: part of `step_s` spent compiling (rows `compiled`).
        evaluation_s: seconds of held-out evaluations and tasks.
        checkpoint_s: seconds in which training waited for checkpoints.
        exchange_s: seconds of exchanges between islands.
    """

    since: float | None = None
    until: float | None = None
    steps: int = 0
    step_s: float = 0.0
    data_wait_s: float = 0.0
    compile_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    exchange_s: float = 0.0
    _straggler_s: float = field(default=0.0, repr=False)
    _wait_s: float = field(default=0.0, repr=False)
    _unreported: int = field(default=0, repr=False)
    _unreported_s: float = field(default=0.0, repr=False)

    @property
    def straggler_s(self) -> float:
        """Estimated seconds of the steps in which ranks waited for slower ranks.

        A straggler report's wait per step counts for the steps since the previous report; the last report's wait also
        counts for the steps after it. It never exceeds the duration of these steps without their data wait.
        """
        return self._straggler_s + min(self._wait_s * self._unreported, self._unreported_s)

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row of metrics."""
        time = seconds_of(row.get("time"))
        if time is not None:
            self.since, self.until = time if self.since is None else self.since, time
        kind, seconds = row.get("kind"), _number(row, "seconds")
        if kind == "step":
            self._add_step(seconds, min(seconds, _number(row, "data_wait_seconds")))
        elif kind == HELD_OUT or str(kind).startswith(TASK):
            self.evaluation_s += seconds
        elif kind == "event":
            self._add_event(str(row.get("event")), row, seconds)

    def lost(self) -> dict[str, float | int]:
        """Returns the fields of an event `lost`, which `LostSteps` reads."""
        names = ("evaluation_s", "checkpoint_s", "exchange_s", "compile_s")
        other = {f"{name.removesuffix('_s')}_seconds": getattr(self, name) for name in names if getattr(self, name)}
        return {"steps": self.steps, "seconds": self.step_s, **other}

    def _add_step(self, seconds: float, waited: float) -> None:
        self.steps += 1
        self.step_s += seconds
        self.data_wait_s += waited
        self._unreported += 1
        self._unreported_s += seconds - waited

    def _add_event(self, event: str, row: Mapping[str, Any], seconds: float) -> None:
        if event in ("checkpoint", "checkpoint_failed"):
            self.checkpoint_s += _number(row, "blocked_seconds" if "blocked_seconds" in row else "waited_seconds")
        elif event == "compiled":
            compiled = min(seconds, self._unreported_s)
            self.compile_s += compiled
            self._unreported_s -= compiled
        elif event == "exchange":
            self.exchange_s += seconds
        elif event == "stragglers":
            self._wait_s = _number(row, "wait_seconds")
            self._straggler_s += min(self._wait_s * self._unreported, self._unreported_s)
            self._unreported, self._unreported_s = 0, 0.0


class SumsByAttempt:
    """Sums of growing metrics for each attempt that has rows; an event `started` or `resumed` begins an attempt."""

    def __init__(self) -> None:
        self.parts: list[TimeSums] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds the next row of the file."""
        if not self.parts or row.get("event") in _BEGINS:
            self.parts.append(TimeSums())
        self.parts[-1].add(row)


def _number(row: Mapping[str, Any], key: str) -> float:
    """Returns a number of a row; 0 where it is missing or not a number, as in a straggler report's `seconds`."""
    value = row.get(key, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
