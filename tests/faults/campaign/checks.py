"""What has to hold after every strike, whatever it was."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from headrace.base.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from pipeline.faults.report import read_faults
from tests.faults.campaign.layouts import EVALUATE_EVERY, SAVE_EVERY, STEPS
from tests.faults.campaign.start import Start, steps_of
from tests.faults.campaign.strikes import Blow, Kind

GOES_ON = 8
"""Steps that are done at most between a signal and the stop, by what is seen from outside."""
Sort = Literal["hung", "resumed wrongly", "lost more", "told wrongly"]


@dataclass(frozen=True)
class Violation:
    """A promise that was broken."""

    sort: Sort
    what: str


@dataclass(frozen=True)
class Reference:
    """What a run that nobody touched has: step -> loss, of training and of evaluation."""

    losses: Mapping[int, float]
    evaluations: Mapping[int, float]

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> Reference:
        """From its journal."""
        return cls(*({r["step"]: r["loss"] for r in rows if r["kind"] == kind} for kind in ("step", "eval")))


def wrong_journal(rows: list[dict[str, Any]], reference: Reference) -> Iterator[Violation]:
    """Every step once and in order, with the reference's losses to the last bit; the same of evaluations."""
    steps = steps_of(rows)
    if steps != list(range(1, len(steps) + 1)):
        yield Violation("resumed wrongly", f"the journal has the steps {steps}")
    for row in rows:
        known = {"step": reference.losses, "eval": reference.evaluations}.get(row["kind"])
        if known is not None and row["loss"] != known.get(row["step"]):
            there = f"{row['kind']} {row['step']}: loss {row['loss']!r}"
            yield Violation("resumed wrongly", f"{there}, but the reference has {known.get(row['step'])!r}")
            return
    evaluations = [row["step"] for row in rows if row["kind"] == "eval"]
    last = len(steps)
    due = [step for step in reference.evaluations if step < last]
    if evaluations not in (due, [*due, last]):
        yield Violation("resumed wrongly", f"evaluations of the steps {evaluations}, but {due} are due by step {last}")


def wrong_resume(start: Start, newest: int, damaged: Set[int]) -> Iterator[Violation]:
    """It goes on from the newest checkpoint that was whole, and from none that was not."""
    step = start.resumed_after()
    if step is None:
        return
    if step < newest:
        yield Violation("lost more", f"it went on after step {step}, though the checkpoint of {newest} was whole")
    if step in damaged:
        yield Violation("resumed wrongly", f"it went on from the checkpoint of step {step}, which was damaged")


def lost_more(start: Start, whole: list[int], code: int | None) -> Iterator[Violation]:
    """Of what this start has done, no more is lost than since the beginning of the checkpoint before."""
    done, newest = start.done(), max(whole, default=0)
    if done == 0:
        return
    if "stopped by SIG" in start.said and code in (EXIT_REQUEUE, EXIT_INTERRUPTED, 0) and newest != done:
        yield Violation("lost more", f"it was asked to stop after step {done}, and has saved step {newest}")
    begun = SAVE_EVERY * ((done - 1) // SAVE_EVERY)
    safe = begun - SAVE_EVERY  # when the next one has begun, the one before has its name
    if safe > (start.resumed_after() or 0) and newest < safe:
        yield Violation("lost more", f"step {done} was done, and the newest whole checkpoint is of step {newest}")


def told_wrongly(start: Start, blow: Blow, kind: Kind, faults_before: int) -> Iterator[Violation]:
    """One report at most, which names whoever it was; no traceback; a documented exit code."""
    said = start.said
    if blow.victim is not None and "SIGTERM" not in kind.name:
        yield from named_wrongly(start, blow, faults_before)
    faults = read_faults(start.run_dir)[faults_before:]
    if len(faults) > 1:
        yield Violation("told wrongly", f"{len(faults)} faults are recorded: {[fault['ranks'] for fault in faults]}")
    reports = [line for line in said.splitlines() if line.startswith("error: rank") and " of " in line]
    if blow.victim is not None and len(reports) > 1:
        yield Violation("told wrongly", f"{len(reports)} reports: {reports}")
    if blow.asked_at is not None and start.done() > blow.asked_at + GOES_ON:
        yield Violation("told wrongly", f"asked to stop after step {blow.asked_at}, it went on to step {start.done()}")
    if start.launcher in ("warm", "nproc", "plain"):
        code = start.process.returncode
        finished = code == 0 and start.done() == STEPS
        if code not in blow.codes and not finished:
            yield Violation("told wrongly", f"exit code {code}; in order were {sorted(blow.codes)}")
        if "Traceback" in said:
            yield Violation("told wrongly", "a traceback was shown")


def named_wrongly(start: Start, blow: Blow, faults_before: int) -> Iterator[Violation]:
    """The rank that was struck is named, by the watchdog or by whoever waited for it, and no other."""
    faults = read_faults(start.run_dir)[faults_before:]
    watched = [sorted(rank["rank"] for rank in fault["ranks"]) for fault in faults]
    if blow.named and watched != [[blow.victim]]:
        yield Violation("told wrongly", f"rank {blow.victim} was struck, and the faults name {watched}")
    elif watched and blow.victim not in watched[0]:
        yield Violation("told wrongly", f"rank {blow.victim} was struck, and the fault names {watched}")
    waited_for = named_in(start.said)
    if waited_for - {blow.victim}:
        yield Violation("told wrongly", f"rank {blow.victim} was struck, and ranks {sorted(waited_for)} waited for")
    if blow.told and not (watched or waited_for):
        yield Violation("told wrongly", f"rank {blow.victim} was stopped, and nobody names it")


def named_in(said: str) -> set[int]:
    """The ranks that others say they have waited for in vain, before the watchdog was there."""
    blamed = re.findall(r"error[^:]*: ((?:(?:, )?rank \d+ (?:on|at) \S+)+) did not answer", said)
    absent = re.findall(r"error[^:]*: ranks? ([\d, ]+) of \d+ never came", said)
    first = ["0"] if re.search(r"rank 0 never came", said) else []
    numbers = [number for text in blamed for number in re.findall(r"rank (\d+)", text)]
    return {int(number) for number in [*numbers, *first, *(n for text in absent for n in text.split(", "))]}


def wrong_end(start: Start) -> Iterator[Violation]:
    """Of a run that came to its end by itself."""
    if start.process.returncode != 0:
        yield Violation("resumed wrongly", f"it ended by itself with exit code {start.process.returncode}")
        return
    rows = start.rows()
    due = [*range(EVALUATE_EVERY, STEPS, EVALUATE_EVERY), STEPS]
    if len(steps_of(rows)) != STEPS or [r["step"] for r in rows if r["kind"] == "eval"] != due:
        yield Violation("resumed wrongly", "it said that it had finished, but its journal is not complete")
