"""Goodput: accounts for the wall clock of a run's directory, over all its attempts.

    goodput = (seconds of the steps in the final history - seconds of their waits) / seconds since the first start

"Goodput" has the meaning of Google's ML Productivity Goodput (2024), for the run's own hardware; ByteRobust
(arXiv:2509.16293) calls this quotient ETTR, the effective training time ratio. The categories are disjoint, and their
sum is the wall clock: `other` has all time that is not measured. docs/how-to/goodput.md lists the source of each
category.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from foundation.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, DataError
from foundation.foreign_json import read_json
from pipeline.runtime.goodput.attempts import RecordedAttempt, read_attempts
from pipeline.runtime.goodput.metrics import Metrics, MetricsReader
from pipeline.runtime.metrics.sinks import JournalRow
from pipeline.runtime.metrics.time_sums import TimeSums
from pipeline.runtime.metrics.times import seconds_of

STOPPED = frozenset({0, EXIT_REQUEUE, EXIT_INTERRUPTED})
"""Exit codes of attempts that end after a finished and saved step."""
_HANGS = frozenset({"silent", "stuck"})
"""Faults before which nothing was computed: until such a fault is found, the run counts as down."""


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of a run, or of one of its attempts, by category.

    Attributes:
        productive: steps of the final history, without the time in the categories below.
        lost: steps that were trained and discarded (later than the checkpoint of a restart, or undone by a rollback),
            and the step that an attempt did not finish.
        startup: time from the start of a process to its first step (imports, connecting, loading), compiling, and the
            time from the last step before a rollback to the first step after it.
        down: time from the submission to the first start; from the end (or last record) of an attempt to the next
            start (detection, queue, launch); and a hang until the watchdog ends it.
        data_wait: rank 0's wait for its batch, over the steps of the final history.
        checkpoint: waits of training for checkpoints.
        evaluation: held-out evaluations and tasks.
        stragglers: waits for slower ranks, over the steps of the final history; estimated from straggler reports.
        exchange: exchanges between islands.
        other: all other time: the step under way, profiles, reports, the end of an attempt.
    """

    productive: float = 0.0
    lost: float = 0.0
    startup: float = 0.0
    down: float = 0.0
    data_wait: float = 0.0
    checkpoint: float = 0.0
    evaluation: float = 0.0
    stragglers: float = 0.0
    exchange: float = 0.0
    other: float = 0.0

    @property
    def wall(self) -> float:
        """Seconds of all categories."""
        return float(sum(asdict(self).values()))

    @property
    def goodput(self) -> float:
        """Productive share of the time, from 0 to 1."""
        return self.productive / self.wall if self.wall > 0 else 0.0

    def __add__(self, other: TimeSpent) -> TimeSpent:
        """Adds two accounts, category by category."""
        return TimeSpent(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True)
class AttemptTime:
    """The time of one attempt, with the wait before it.

    Attributes:
        number: number of the attempt, from 1.
        begin: end of the previous attempt, or beginning of the run, in seconds since the epoch.
        end: end of the attempt, its last record if it was killed, or now while it trains, in seconds since the epoch.
        spent: seconds by category, whose sum is the time from `begin` to `end`.
    """

    number: int
    begin: float
    end: float
    spent: TimeSpent


@dataclass(frozen=True)
class Goodput:
    """Time of a run by category.

    Attributes:
        attempts: times of the attempts, oldest first; each begins at the end of the previous one.
    """

    attempts: tuple[AttemptTime, ...]

    @property
    def spent(self) -> TimeSpent:
        """Seconds of all attempts, by category."""
        return sum((each.spent for each in self.attempts), TimeSpent())

    @property
    def wall(self) -> float:
        """Seconds from the run's submission (its first start if not recorded) to its end or now."""
        return self.attempts[-1].end - self.attempts[0].begin

    @property
    def share(self) -> float:
        """Goodput, from 0 to 1."""
        return self.spent.goodput

    def row(self) -> JournalRow:
        """Returns the fields of a `goodput` event and of `status --json`: seconds, except `share` and `attempts`."""
        return {"share": self.share, "wall": self.wall, **asdict(self.spent), "attempts": len(self.attempts)}


def read_goodput(run_dir: Path, *, training: bool | None) -> Goodput | None:
    """Reads the goodput of a run until now; None before its first step.

    Args:
        run_dir: the run's directory.
        training: whether a process trains the run now; None if unknown.
    """
    metrics = MetricsReader(run_dir).read()
    last = {"last_step": metrics.step["step"], "last_time": metrics.last_time}
    attempts, _ = read_attempts(run_dir, training=training, **last)
    return goodput_of(metrics, attempts, now=time.time(), submitted=submission_time(run_dir))


def submission_time(run_dir: Path) -> float | None:
    """Reads when `headrace submit` first submitted the run without jobs to wait for; None if it never did."""
    times = (_submitted(path) for path in run_dir.glob("submissions/*/submission.json"))
    return min((time for time in times if time is not None), default=None)


def _submitted(path: Path) -> float | None:
    with suppress(OSError, DataError, AttributeError):
        found = read_json(path)
        return seconds_of(found.get("submitted")) if len(found.get("jobs", {})) == 1 else None
    return None


def goodput_of(
    metrics: Metrics, attempts: Sequence[RecordedAttempt], *, now: float, submitted: float | None = None
) -> Goodput | None:
    """Computes the goodput of a run; None before its first step.

    Args:
        metrics: metrics of the run.
        attempts: all attempts; empty for a run without a journal of attempts, whose rows count as one attempt.
        now: current time, in seconds since the epoch.
        submitted: time when the run's first job was submitted, in seconds since the epoch; None where unknown.
    """
    parts = [part for part in metrics.sums.parts if part.since is not None]
    if not any(part.steps for part in parts) and not any(attempt.lost for attempt in attempts):
        return None
    if not attempts:
        return _without_attempts(metrics, parts)
    begin = min(attempts[0].launched, attempts[0].started if submitted is None else submitted)
    found: list[AttemptTime] = []
    for attempt, after in zip(attempts, [*attempts[1:], None], strict=True):
        begin = found[-1].end if found else begin
        end = max(begin, attempt.ended if attempt.ended is not None else now)
        until = None if after is None else after.started
        own = [part for part in parts if _is_of(attempt, part, until)]
        found.append(AttemptTime(attempt.number, begin, end, _spent(attempt, own, begin=begin, end=end)))
    return Goodput(tuple(found))


def _without_attempts(metrics: Metrics, parts: Sequence[TimeSums]) -> Goodput | None:
    if metrics.first_time is None or metrics.last_time is None:
        return None
    wall = metrics.last_time - metrics.first_time
    spent = _complete(_of_steps(parts), wall)
    if not spent.wall:
        return None
    return Goodput((AttemptTime(1, metrics.last_time - spent.wall, metrics.last_time, spent),))


def _is_of(attempt: RecordedAttempt, part: TimeSums, until: float | None) -> bool:
    assert part.since is not None
    return attempt.started <= part.since and (until is None or part.since < until)


def _spent(attempt: RecordedAttempt, parts: Sequence[TimeSums], *, begin: float, end: float) -> TimeSpent:
    launched = min(max(begin, attempt.launched), end)
    trained = min(end if attempt.trained is None else max(launched, attempt.trained), end)
    unfinished = _unfinished(attempt, parts, end) if attempt.trained is not None else 0.0
    hung = attempt.fault in _HANGS
    around = TimeSpent(
        startup=trained - launched + attempt.reloading_s + sum(each.compile_s for each in attempt.lost),
        down=launched - begin + (unfinished if hung else 0.0),
        lost=sum(each.seconds - each.compile_s for each in attempt.lost) + (0.0 if hung else unfinished),
        evaluation=sum(each.evaluation_s for each in attempt.lost),
        checkpoint=sum(each.checkpoint_s for each in attempt.lost),
        exchange=sum(each.exchange_s for each in attempt.lost),
    )
    return _complete(_of_steps(parts) + around, end - begin)


def _of_steps(parts: Sequence[TimeSums]) -> TimeSpent:
    """Sums the time by category over the rows of the final history."""
    found = TimeSpent()
    for part in parts:
        waited = part.data_wait_s + part.compile_s + part.straggler_s
        found += TimeSpent(
            productive=max(0.0, part.step_s - waited),
            startup=part.compile_s,
            data_wait=part.data_wait_s,
            stragglers=part.straggler_s,
            evaluation=part.evaluation_s,
            checkpoint=part.checkpoint_s,
            exchange=part.exchange_s,
        )
    return found


def _unfinished(attempt: RecordedAttempt, parts: Sequence[TimeSums], end: float) -> float:
    """Returns the seconds from an attempt's last row to its end: lost time, unless it ended between two steps."""
    if attempt.ended is None or attempt.code in STOPPED:
        return 0.0
    rows = [part.until for part in parts if part.until is not None] + [each.until for each in attempt.lost]
    return max(0.0, end - max([attempt.trained or end, *rows]))


def _complete(known: TimeSpent, wall: float) -> TimeSpent:
    """Adds `other` to reach the wall clock; an excess from clock differences comes off the largest categories."""
    rest = wall - known.wall
    if rest >= 0:
        return known + TimeSpent(other=rest)
    seconds = asdict(known)
    for name in sorted(seconds, key=lambda each: -seconds[each]):
        taken = min(seconds[name], -rest)
        seconds[name], rest = seconds[name] - taken, rest + taken
    return TimeSpent(**seconds)
