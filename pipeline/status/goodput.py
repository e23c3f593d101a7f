"""Goodput: the share of the time since a run was first started that went into steps that count.

    goodput = seconds of the steps in metrics.jsonl / seconds since the first start

A step that a resume repeats counts once, since its first row is truncated. The rest of the time is split by what is
known; "goodput" is meant as in Google's ML Productivity Goodput (2024), over the run's own hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.status.attempts import Attempt
from pipeline.status.metrics import Metrics


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by what they were spent on.

    Attributes:
        wall: since the first start, until now or until the last attempt ended.
        steps: of the steps that count.
        evaluation: of evaluations.
        saving: in which training waited for checkpoints.
        starting: from the start of an attempt to its first step.
        down: between the end of an attempt and the next start: detection, queue, launch.
        repeated: all else: above all steps that were lost with an attempt and done again.
    """

    wall: float
    steps: float
    evaluation: float
    saving: float
    starting: float
    down: float

    @property
    def repeated(self) -> float:
        """See the class."""
        return max(0.0, self.wall - self.steps - self.evaluation - self.saving - self.starting - self.down)

    @property
    def share(self) -> float:
        """Goodput, from 0 to 1."""
        return min(1.0, self.steps / self.wall) if self.wall > 0 else 0.0


def goodput_of(metrics: Metrics, attempts: Sequence[Attempt], *, now: float) -> Goodput | None:
    """The goodput of a run; None before its first step.

    Args:
        metrics: of the run.
        attempts: all of them; of a run without a journal of attempts none, and its first row is taken for its start.
        now: seconds since the epoch.
    """
    if not metrics.steps_s or metrics.first_time is None or metrics.last_time is None:
        return None
    begin, end = metrics.first_time, metrics.last_time
    if attempts:
        begin = min(begin, attempts[0].started)
        end = now if attempts[-1].ended is None else max(end, attempts[-1].ended)
    return Goodput(
        wall=end - begin,
        steps=metrics.steps_s,
        evaluation=metrics.evaluation_s,
        saving=metrics.saving_s,
        starting=sum(_starting(attempt, now) for attempt in attempts),
        down=sum(max(0.0, after.started - (before.ended or after.started)) for before, after in pairwise(attempts)),
    )


def seconds_left(metrics: Metrics, *, steps: int | None) -> float | None:
    """The estimated rest of a run, evaluations and checkpoints included; None where it is not known yet.

    By the clock on the wall over the last steps without a break of more than ten times the median: a restart.
    """
    recent = list(metrics.recent)
    laps = [later[1] - earlier[1] for earlier, later in pairwise(recent) if later[0] > earlier[0]]
    if steps is None or not laps:
        return None
    median = sorted(laps)[len(laps) // 2]
    kept = [lap for lap in laps if lap <= 10 * median + 1]
    return max(0, steps - int(metrics.step["step"])) * sum(kept) / len(kept)


def _starting(attempt: Attempt, now: float) -> float:
    until = attempt.trained or attempt.ended or now
    return max(0.0, until - attempt.started)
