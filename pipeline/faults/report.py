"""What is said of a fault, once: a text for a person, and a row of `faults.jsonl` in the run's directory.

The rows stay when a run is resumed, whereas those of `metrics.jsonl` belong to steps and are cut off with them.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from headrace.base.cli import ERROR_FILE
from headrace.base.errors import EXIT_FOLLOWED, EXIT_LOST
from headrace.base.processes import STOPPED, TRACED, machine, state_of
from pipeline.faults.diagnosis import Diagnosis, RankStatus

T = TypeVar("T")
NAME = "faults.jsonl"
_SHOWN = 4
"""Ranks of one verdict that are described in full."""
_STATES = {
    STOPPED: "the process is stopped (SIGSTOP, SIGTSTP or a batch system)",
    TRACED: "the process is stopped by a debugger",
    "D": "the process waits in the kernel for a disk, a network file system or a device, and cannot be ended",
    "Z": "the process has ended",
}


def describe_fault(verdict: Diagnosis, records: Mapping[int, RankStatus], *, world_size: int) -> str:
    """The report, for a person.

    Args:
        verdict: what happened.
        records: of all ranks that are known.
        world_size: number of ranks.
    """
    guilty = [records[rank] for rank in verdict.ranks]
    lines = [f"error: {_headline(verdict, guilty, world_size)}", f"  why: {_why(verdict, guilty[0])}"]
    for record in guilty[:_SHOWN] if verdict.kind != "failed" else []:
        lines += _stack(record, "is" if verdict.kind == "stuck" else "was last seen")
    others = [record for record in records.values() if record.rank not in verdict.ranks and record.present]
    unheard = [rank for rank in range(world_size) if rank not in records]
    if unheard and verdict.kind != "failed":
        lines.append(f"  never heard, so look at them first: {_numbers(unheard)}")
    if others and verdict.kind != "failed":
        lines.append(f"  the others: {_places(others)}")
        if verdict.kind == "stuck":
            lines += _stack(max(others, key=lambda record: record.places), "is")
    if others:
        code = EXIT_FOLLOWED if verdict.kind == "failed" else EXIT_LOST
        lines.append(f"  the other ranks are ended (exit code {code})")
    return "\n".join([*lines, f"  try: {_remedy(verdict, guilty[0])}"])


def row(verdict: Diagnosis, records: Mapping[int, RankStatus], *, world_size: int) -> dict[str, Any]:
    """The same for a program; `seconds` since the ranks were heard, or since anything moved."""
    guilty = [records[rank] for rank in verdict.ranks]
    known = [
        {"rank": r.rank, "host": r.host, "pid": r.pid, "step": r.step, "phase": r.phase, "stack": list(r.stack)}
        | ({"error": r.failed} if r.failed else {})
        for r in guilty
    ]
    return {
        "kind": "event",
        "step": max(record.step for record in records.values()),
        "event": "fault",
        "fault": verdict.kind,
        "ranks": known,
        "seconds": round(verdict.seconds, 3),
        "world_size": world_size,
        "time": time.time(),
    }


def publish(text: str) -> None:
    """Shows the report: to whoever asked for errors in a file, else on stderr."""
    if ERROR_FILE in os.environ:
        Path(os.environ[ERROR_FILE]).write_text(text)
        return
    start = "\n" if sys.stderr.isatty() else ""  # below a progress bar
    print(f"{start}{text}", file=sys.stderr, flush=True)


def claim(run_dir: Path, entry: Mapping[str, Any], *, token: str) -> bool:
    """Appends the row, unless a process of the same start has been first. Of several only one gets true.

    True as well where the file system does not answer or has no locks: better two reports than none.
    """
    return within(3.0, lambda: _append(run_dir / NAME, {**entry, "start": token}), otherwise=True)


def read_faults(run_dir: str | Path) -> list[dict[str, Any]]:
    """The faults of a run, oldest first."""
    path = Path(run_dir) / NAME
    rows = []
    for each in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # half a line, from a full disk
            rows.append(json.loads(each))
    return rows


def within(seconds: float, action: Callable[[], T], *, otherwise: T) -> T:
    """What `action` gives, or `otherwise` when it raises OSError or takes longer: a dead file system has no end."""
    answers: list[T] = []

    def act() -> None:
        try:
            answers.append(action())
        except OSError:
            answers.append(otherwise)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else otherwise


def _append(path: Path, entry: Mapping[str, Any]) -> bool:
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = file.read()
        if f'"start": "{entry["start"]}"' in known:
            return False
        whole = not known or known.endswith("\n")
        file.write("" if whole else "\n")
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return True


def _headline(verdict: Diagnosis, guilty: Sequence[RankStatus], world_size: int) -> str:
    first = guilty[0]
    pid = f" (pid {first.pid})" if first.pid else ""
    who = f"rank {first.rank} of {world_size} on {first.host}{pid}"
    more = f"; the same of {_listed(guilty[1:])}" if len(guilty) > 1 else ""
    place = f"at step {first.step}, in {first.phase}"
    match verdict.kind:
        case "died":
            return f"{who} died; heard {verdict.seconds:.1f} s before, {place}{more}"
        case "silent":
            return f"{who} has been silent for {verdict.seconds:.1f} s; it was {place}{more}"
        case "lost":
            return f"{who} lost its link to another rank {place}{more}"
        case "stuck":
            return f"{who} hangs {place}, without progress for {verdict.seconds:.1f} s{more}"
        case _:
            return f"{who} failed {place}: {first.failed}"


def _why(verdict: Diagnosis, first: RankStatus) -> str:
    if verdict.kind == "died":
        return "its connection closed without a word, as after kill -9, a crash or the kernel's out-of-memory killer"
    if verdict.kind == "failed":
        return "an error of its own; it is told in full where that rank writes"
    if verdict.kind == "lost":
        return f"no rank has died or failed by itself, but: {first.failed}"
    if first.starved:
        return "a call holds Python's interpreter lock, so that not even its watchdog runs"
    if verdict.kind == "stuck":
        return "no rank has come further; this is who has come the least far, or does not wait for others"
    state = state_of(first.pid)[0] if first.machine == machine() else ""
    return _STATES.get(state, "it is stopped, or its host or the network to it is gone")


def _remedy(verdict: Diagnosis, first: RankStatus) -> str:
    again = "start again: the run goes on from its newest checkpoint"
    match verdict.kind:
        case "died":
            return f"look for 'Out of memory' or a crash in `dmesg` on {first.host}; {again}"
        case "silent":
            return f"look at {first.host}; {again}. Raise watchdog.heartbeat_timeout if this was no fault"
        case "lost":
            return f"{again}. If it happens again, look at the network between the hosts, and at {first.host}'s cards"
        case "stuck":
            return f"{again}. Raise watchdog.hang_timeout if this phase may take so long"
        case _:
            return f"mend what it says; {again}"


def _stack(record: RankStatus, when: str) -> list[str]:
    if not record.stack:
        return [f"  rank {record.rank} has told no stack yet"]
    shown = [f"    {call}" for call in record.stack]
    return [f"  where rank {record.rank} {when} (innermost call first):", *shown]


def _places(records: Sequence[RankStatus]) -> str:
    """Ranks by the place they are at: "ranks 0, 2-7 at step 17, in training"."""
    found: dict[tuple[int, str], list[RankStatus]] = {}
    for record in sorted(records, key=lambda record: record.rank):
        found.setdefault((record.step, record.phase), []).append(record)
    parts = [f"{_listed(group)} at step {step}, in {phase}" for (step, phase), group in found.items()]
    return "; ".join(parts[:8]) + ("; ..." if len(parts) > 8 else "")


def _listed(records: Sequence[RankStatus]) -> str:
    """Numbers with ranges: "ranks 0, 2-7"."""
    return _numbers(record.rank for record in records)


def _numbers(numbers: Iterable[int]) -> str:
    ranks = sorted(numbers)
    there = set(ranks)
    starts = [rank for rank in ranks if rank - 1 not in there]
    ends = [rank for rank in ranks if rank + 1 not in there]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs[:12])}" + (", ..." if len(runs) > 12 else "")
