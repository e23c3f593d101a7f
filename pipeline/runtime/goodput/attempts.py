"""The attempts of a run with the cause of each end, from `attempts.jsonl`, `faults.jsonl` and the agents' plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.errors import EXIT_FOLLOWED, EXIT_LOST
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.metrics.attempts_journal import read_events
from pipeline.runtime.metrics.sinks import JournalRow
from pipeline.runtime.metrics.times import seconds_of

_VERBS = {
    "died": "was killed or crashed",
    "silent": "stopped answering",
    "lost": "lost its connection to another rank",
    "stuck": "hangs",
    "failed": "failed",
}
_UNKNOWN = "killed without a word: SIGKILL of all ranks (scancel, out of memory), or the loss of rank 0's host"


@dataclass(frozen=True)
class LostSteps:
    """Steps of one attempt whose rows a resume or a rollback has removed from the metrics.

    Attributes:
        since, until: times of the first and the last row that was removed, since the epoch.
        steps: number of steps.
        seconds: seconds of the steps, from report to report, compilations included.
        compile_s: seconds of compilations within these steps.
        evaluation_s: seconds of evaluations among the removed rows.
        checkpoint_s: seconds in which training waited for checkpoints, from the removed rows.
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
        """Tells whether the attempt with these events trained the steps; the next attempt, if any, began at `until`."""
        begun = seconds_of(group[0]["time"]) or 0.0
        return begun <= self.since and (until is None or self.since < until)


def lost_steps(events: Iterable[Mapping[str, Any]]) -> list[LostSteps]:
    """Reads all lost steps of a run, oldest first; skips damaged events.

    A start may be killed after it has recorded the rows that it is about to remove. The next start then records the
    same rows again: among events whose rows overlap in time, the newest counts.
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


@dataclass(frozen=True)
class RecordedAttempt:
    """One start of a run. Times are seconds since the epoch.

    Attributes:
        number: number of the attempt, from 1.
        launched: time when its process began, if that is recorded; else `started`.
        started: time when the run's directory was locked.
        trained: time when its first step began; None where it began none.
        step: step after which it began to train.
        reached: the last step in its rows of metrics; None where it is not known yet.
        ended: time of its end or, if it was killed, of its last record; None while it runs.
        code: its exit code; None for one that was killed.
        fault: kind of fault that the watchdog found: "died", "stuck", ...; empty where it found none.
        reason: why it ended; empty while it runs.
        world_size: number of ranks.
        nodes: host -> ranks.
        job: number of its Slurm job.
        requeue: number of times that Slurm had restarted the job before this attempt.
        read: bytes of the checkpoint that it read at its start, by source (`pipeline.run.attempts`).
        loading_s: seconds of loading the checkpoint.
        reloading_s: seconds from the last step before a rollback to the first step after it.
        lost: steps of this attempt that a resume or a rollback has removed.
    """

    number: int
    launched: float
    started: float
    trained: float | None
    step: int
    reached: int | None
    ended: float | None
    code: int | None
    reason: str
    fault: str
    world_size: int
    nodes: Mapping[str, str] = field(default_factory=dict)
    job: str | None = None
    requeue: str | None = None
    read: Mapping[str, int] = field(default_factory=dict)
    loading_s: float = 0.0
    reloading_s: float = 0.0
    lost: tuple[LostSteps, ...] = ()


def read_attempts(
    run_dir: Path, *, training: bool | None, last_step: int, last_time: float | None
) -> tuple[list[RecordedAttempt], int]:
    """Reads the attempts of a run, oldest first, and the number of damaged lines in their journal.

    Args:
        run_dir: the run's directory.
        training: whether a process trains the run now; None if unknown.
        last_step: newest step in the metrics.
        last_time: time of the last row of metrics, in seconds since the epoch; None without rows.
    """
    events, damaged = read_events(run_dir)
    groups: dict[str, list[JournalRow]] = {}
    for event in events:
        groups.setdefault(str(event.get("attempt")), []).append(event)
    begun = [group for group in groups.values() if group[0]["event"] == "start"]
    faults, lost = read_faults(run_dir), lost_steps(events)
    found = []
    for number, (group, after) in enumerate(zip(begun, [*begun[1:], None], strict=False), start=1):
        end = {"step": last_step, "time": last_time} if after is None else after[0].get("before", {})
        until = None if after is None else seconds_of(after[0]["time"])
        runs = after is None and training is not False
        own = _faults_between(faults, group, until)
        found.append(_attempt(number, group, end, own, [each for each in lost if each.of(group, until)], runs=runs))
    return found, damaged


def fault_line(row: Mapping[str, Any]) -> str:
    """Describes a fault in one line: "rank 1 on n2 was killed or crashed at step 17, in training"."""
    ranks = row.get("ranks") or [{}]
    first, kind = ranks[0], str(row.get("fault"))
    who = f"rank {first.get('rank', '?')} on {first.get('host', '?')}"
    others = len(ranks) - 1 + int(row.get("further", 0))
    more = f" (and {others:,} more)" if others else ""
    where = f" at step {first['step']}, in {first.get('phase', '?')}" if "step" in first else ""
    error = f": {first['error']}" if first.get("error") else ""
    return f"{who}{more} {_VERBS.get(kind, kind)}{where}{error}"


def _attempt(
    number: int,
    group: list[JournalRow],
    last: Mapping[str, Any],
    faults: list[JournalRow],
    lost: list[LostSteps],
    *,
    runs: bool,
) -> RecordedAttempt:
    of: dict[str, JournalRow] = {}
    for event in group:
        of.setdefault(event["event"], event)  # a rollback trains more than once
    start, training, end = of["start"], of.get("training", {}), of.get("end")
    started = seconds_of(start["time"]) or 0.0
    code, reason = (end["code"], end["reason"]) if end else (None, "")
    if faults and code in (None, EXIT_LOST, EXIT_FOLLOWED):  # the cause, not its consequences
        reason, code = fault_line(faults[-1]), code or EXIT_LOST
    last_sign = max(started, *(seconds_of(row.get("time")) or 0.0 for row in [last, *group, *faults]))
    ended = seconds_of(end["time"]) if end else None if runs and not faults else last_sign
    step = int(training.get("step", 0))
    reached = last.get("step") if training else None
    return RecordedAttempt(
        number=number,
        launched=min(started, seconds_of(start.get("process_start")) or started),
        started=started,
        trained=seconds_of(training.get("time")) if training else None,
        step=step,
        reached=None if reached is None else max(int(reached), step),
        ended=ended,
        code=code,
        reason=reason or ("" if ended is None else _UNKNOWN),
        fault=str(faults[-1].get("fault", "")) if faults else "",
        world_size=int(start.get("world_size", 1)),
        nodes=of.get("nodes", {}).get("nodes", {}),
        job=start.get("job"),
        requeue=start.get("requeue"),
        read=of.get("loaded", {}).get("read", {}),
        loading_s=of.get("loaded", {}).get("seconds", 0.0),
        reloading_s=_reloading(group, lost),
        lost=tuple(lost),
    )


def _reloading(group: Sequence[JournalRow], lost: Sequence[LostSteps]) -> float:
    """Sums an attempt's seconds from the last step before each rollback to the first step after it."""
    again = [seconds_of(row["time"]) or 0.0 for row in group if row["event"] == "training"][1:]
    before = ([each.until for each in lost if each.until <= time] for time in again)
    return sum(time - max(until) for time, until in zip(again, before, strict=True) if until)


def _faults_between(faults: Sequence[JournalRow], group: Sequence[JournalRow], until: float | None) -> list[JournalRow]:
    since = seconds_of(group[0]["time"]) or 0.0
    times = ((row, seconds_of(row.get("time"))) for row in faults)
    return [row for row, time in times if time is not None and since <= time and (until is None or time < until)]
