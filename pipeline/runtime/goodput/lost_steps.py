"""Steps that were trained and thrown away: the events `lost` of the journal of attempts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.runtime.metrics.times import seconds_of


@dataclass(frozen=True)
class LostSteps:
    """Steps of one attempt whose rows a resume or a rollback has removed from the metrics.

    Attributes:
        since, until: times of the first and the last row that was removed, since the epoch.
        steps: number of steps.
        seconds: seconds of the steps, from report to report, compilations included.
        compile_s: seconds of compilations among them.
        evaluation_s: seconds of evaluations among the removed rows.
        checkpoint_s: seconds in which training waited for checkpoints, by the removed rows.
        exchange_s: seconds of exchanges between islands among the removed rows.
    """

    since: float
    until: float
    steps: int
    seconds: float
    compile_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    exchange_s: float = 0.0

    def of(self, group: Sequence[Mapping[str, Any]], until: float | None) -> bool:
        """Whether the attempt with these events trained the steps; the next attempt, if any, began at `until`."""
        begun = seconds_of(group[0]["time"]) or 0.0
        return begun <= self.since and (until is None or self.since < until)


def lost_steps(events: Iterable[Mapping[str, Any]]) -> list[LostSteps]:
    """All lost steps of a run, oldest first; damaged events are left out.

    A start that is killed after it has recorded what it is about to remove leaves it to the next one, which records the
    same rows again: the newest of the events whose rows overlap in time counts.
    """
    found: list[LostSteps] = []
    for event in events:
        lost = _lost(event) if event.get("event") == "lost" else None
        if lost is not None:
            found = [each for each in found if each.until < lost.since or lost.until < each.since]
            found.append(lost)
    return sorted(found, key=lambda each: each.since)


def _lost(event: Mapping[str, Any]) -> LostSteps | None:
    since, until = seconds_of(event.get("since")), seconds_of(event.get("until"))
    if since is None or until is None:
        return None
    names = ("compile", "evaluation", "checkpoint", "exchange")
    try:
        parts = {f"{name}_s": float(event.get(f"{name}_seconds", 0.0)) for name in names}
        return LostSteps(since, until, int(event["steps"]), float(event["seconds"]), **parts)
    except (KeyError, TypeError, ValueError):
        return None
