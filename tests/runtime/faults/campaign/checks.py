"""Checks after every injected fault: journal, resume, loss of steps, report, exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from foundation.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from pipeline.runtime.faults.report import read_faults
from tests.runtime.faults.campaign.injections import FaultKind, Injection
from tests.runtime.faults.campaign.layouts import EVALUATE_EVERY, SAVE_EVERY, STEPS
from tests.runtime.faults.campaign.start import Start, steps_of

STOP_STEPS = 8
"""Upper bound of the steps between a stop signal and the stop, as seen from outside."""
Sort = Literal["hung", "resumed wrongly", "lost more", "reported wrongly"]


@dataclass(frozen=True)
class Violation:
    sort: Sort
    what: str


@dataclass(frozen=True)
class Reference:
    """Losses of an undisturbed run: step -> loss, of training and of evaluation."""

    losses: Mapping[int, float]
    evaluations: Mapping[int, float]

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> Reference:
        return cls(*({r["step"]: r["loss"] for r in rows if r["kind"] == kind} for kind in ("step", "eval")))


def wrong_journal(rows: list[dict[str, Any]], reference: Reference) -> Iterator[Violation]:
    """Every step once and in order, with exactly the reference's losses; the same for evaluations."""
    steps = steps_of(rows)
    if steps != list(range(1, len(steps) + 1)):
        yield Violation("resumed wrongly", f"the journal has the steps {steps}")
    for row in rows:
        known = {"step": reference.losses, "eval": reference.evaluations}.get(row["kind"])
        if known is not None and row["loss"] != known.get(row["step"]):
            row_text = f"{row['kind']} {row['step']}: loss {row['loss']!r}"
            yield Violation("resumed wrongly", f"{row_text}, but the reference has {known.get(row['step'])!r}")
            return
    evaluations = [row["step"] for row in rows if row["kind"] == "eval"]
    last = len(steps)
    due = [step for step in reference.evaluations if step < last]
    if evaluations not in (due, [*due, last]):
        yield Violation("resumed wrongly", f"evaluations of the steps {evaluations}, but {due} are due by step {last}")


def wrong_resume(start: Start, newest: int, damaged: Set[int]) -> Iterator[Violation]:
    """The run resumes from the newest intact checkpoint, and from no damaged one."""
    step = start.resumed_after()
    if step is None:
        return
    if step < newest:
        yield Violation("lost more", f"it resumed after step {step}, though the checkpoint of {newest} was intact")
    if step in damaged:
        yield Violation("resumed wrongly", f"it resumed from the checkpoint of step {step}, which was damaged")


def lost_more(start: Start, intact: list[int], code: int | None) -> Iterator[Violation]:
    """No more steps are lost than since the beginning of the previous checkpoint."""
    done, newest = start.done(), max(intact, default=0)
    if done == 0:
        return
    if "stopped by SIG" in start.output and code in (EXIT_REQUEUE, EXIT_INTERRUPTED, 0) and newest != done:
        yield Violation("lost more", f"it was stopped after step {done}, and has saved step {newest}")
    begun = SAVE_EVERY * ((done - 1) // SAVE_EVERY)
    safe = begun - SAVE_EVERY  # when a checkpoint begins, the previous one is committed
    if safe > (start.resumed_after() or 0) and newest < safe:
        yield Violation("lost more", f"step {done} was done, and the newest intact checkpoint is of step {newest}")


def wrong_report(start: Start, injection: Injection, kind: FaultKind, faults_before: int) -> Iterator[Violation]:
    """At most one report, which names the right rank; no traceback; a documented exit code."""
    output = start.output
    if injection.victim is not None and "SIGTERM" not in kind.name:
        yield from wrong_rank_named(start, injection, faults_before)
    faults = read_faults(start.run_dir)[faults_before:]
    if len(faults) > 1:
        yield Violation(
            "reported wrongly", f"{len(faults)} faults are recorded: {[fault['ranks'] for fault in faults]}"
        )
    reports = [line for line in output.splitlines() if line.startswith("error: rank") and " of " in line]
    if injection.victim is not None and len(reports) > 1:
        yield Violation("reported wrongly", f"{len(reports)} reports: {reports}")
    if injection.stop_step is not None and start.done() > injection.stop_step + STOP_STEPS:
        yield Violation(
            "reported wrongly", f"stopped after step {injection.stop_step}, it continued to step {start.done()}"
        )
    if start.launcher in ("warm", "nproc", "plain"):
        code = start.process.returncode
        finished = code == 0 and start.done() == STEPS
        if code not in injection.codes and not finished:
            yield Violation("reported wrongly", f"exit code {code}; expected one of {sorted(injection.codes)}")
        if "Traceback" in output:
            yield Violation("reported wrongly", "a traceback was printed")


def wrong_rank_named(start: Start, injection: Injection, faults_before: int) -> Iterator[Violation]:
    """The victim is named, by the watchdog or by the ranks that waited for it, and no other rank."""
    faults = read_faults(start.run_dir)[faults_before:]
    fault_ranks = [sorted(rank["rank"] for rank in fault["ranks"]) for fault in faults]
    if injection.watchdog_names_it and fault_ranks != [[injection.victim]]:
        yield Violation(
            "reported wrongly", f"rank {injection.victim} was the victim, and the faults name {fault_ranks}"
        )
    elif fault_ranks and injection.victim not in fault_ranks[0]:
        yield Violation(
            "reported wrongly", f"rank {injection.victim} was the victim, and the fault names {fault_ranks}"
        )
    waited_for = named_in(start.output)
    if waited_for - {injection.victim}:
        yield Violation(
            "reported wrongly",
            f"rank {injection.victim} was the victim, and ranks {sorted(waited_for)} were waited for",
        )
    if injection.must_be_named and not (fault_ranks or waited_for):
        yield Violation("reported wrongly", f"rank {injection.victim} was stopped, and no message names it")


def named_in(output: str) -> set[int]:
    """The ranks named in start-up errors of ranks that waited for them, before the watchdog runs."""
    not_answering = re.findall(r"error[^:]*: ((?:(?:, )?rank \d+ (?:on|at) \S+)+) did not answer", output)
    absent = re.findall(r"error[^:]*: ranks? ([\d, ]+) of \d+ did not join", output)
    first = ["0"] if re.search(r"rank 0 did not join", output) else []
    numbers = [number for text in not_answering for number in re.findall(r"rank (\d+)", text)]
    return {int(number) for number in [*numbers, *first, *(n for text in absent for n in text.split(", "))]}


def wrong_end(start: Start) -> Iterator[Violation]:
    if start.process.returncode != 0:
        yield Violation("resumed wrongly", f"it exited by itself with exit code {start.process.returncode}")
        return
    rows = start.rows()
    due = [*range(EVALUATE_EVERY, STEPS, EVALUATE_EVERY), STEPS]
    if len(steps_of(rows)) != STEPS or [r["step"] for r in rows if r["kind"] == "eval"] != due:
        yield Violation("resumed wrongly", "it reported that it had finished, but its journal is incomplete")
