"""Fault reports: a text for a person, printed once, and a row of `faults.jsonl` in the run's directory.

A resumed run keeps these rows. Rows of `metrics.jsonl` belong to steps and are removed with them.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from foundation.cli import ERROR_FILE
from foundation.errors import EXIT_FOLLOWED, EXIT_LOST
from foundation.foreign_json import json_row
from foundation.processes import STOPPED, TRACED, machine, state_of
from pipeline.runtime.faults.diagnosis import Diagnosis, RankStatus
from pipeline.runtime.metrics.sinks import JournalRow

T = TypeVar("T")
FILE_NAME = "faults.jsonl"
_SHOWN = 4
"""Number of ranks of one diagnosis that are described in full."""
_RECORDED = 16
"""Number of ranks of one diagnosis whose position and stack are in its row: a kilobyte each."""
_OWN_ROWS = 1 << 20
"""Bytes at the end of the file that are searched for a row of the same start."""
_STATES = {
    STOPPED: "the process is stopped (SIGSTOP, SIGTSTP or a batch system)",
    TRACED: "the process is stopped by a debugger",
    "D": "the process waits in the kernel for a disk, a network file system or a device, and cannot be killed",
    "Z": "the process has ended",
}


def describe_fault(diagnosis: Diagnosis, statuses: Mapping[int, RankStatus], *, world_size: int) -> str:
    """Formats the report for people.

    Args:
        diagnosis: cause of the end, and the ranks at fault.
        statuses: rank -> status, for all ranks that have registered.
        world_size: number of ranks.
    """
    at_fault = [statuses[rank] for rank in diagnosis.ranks]
    lines = [f"error: {_headline(diagnosis, at_fault, world_size)}", f"  why: {_why(diagnosis, at_fault[0])}"]
    for status in at_fault[:_SHOWN] if diagnosis.kind != "failed" else []:
        lines += _stack(status, "is" if diagnosis.kind == "stuck" else "was last seen")
        if diagnosis.kind == "stuck":
            lines.append(f"  rank {status.rank} is in {status.collective or 'no collective that is known'}")
    others = [status for status in statuses.values() if status.rank not in diagnosis.ranks and status.monitored]
    unregistered = [rank for rank in range(world_size) if rank not in statuses]
    if unregistered and diagnosis.kind != "failed":
        lines.append(f"  no heartbeat was ever received from {_rank_ranges(unregistered)}: check these first")
    if others and diagnosis.kind != "failed":
        lines.append(f"  the others: {_positions(others)}")
        lines += _collectives(others)
        if diagnosis.kind == "stuck":
            lines += _stack(max(others, key=lambda status: status.transitions), "is")
    if others:
        code = EXIT_FOLLOWED if diagnosis.kind == "failed" else EXIT_LOST
        lines.append(f"  the other ranks are ended (exit code {code})")
    return "\n".join([*lines, f"  try: {_remedy(diagnosis, at_fault[0])}"])


def fault_row(diagnosis: Diagnosis, statuses: Mapping[int, RankStatus], *, world_size: int) -> JournalRow:
    """Builds the report as a row of `faults.jsonl`; `seconds` has the meaning of `Diagnosis.seconds`.

    Only the first of thousands of ranks are described; `further` is the number of the others, `further_ranks` lists
    them.
    """
    ranks = [
        {"rank": s.rank, "host": s.host, "pid": s.pid, "step": s.step, "phase": s.phase, "stack": list(s.stack)}
        | ({"error": s.error} if s.error else {})
        | ({"collective": s.collective} if s.collective else {})
        for s in (statuses[rank] for rank in diagnosis.ranks[:_RECORDED])
    ]
    return {
        "kind": "event",
        "step": max(status.step for status in statuses.values()),
        "event": "fault",
        "fault": diagnosis.kind,
        "ranks": ranks,
        **_other_ranks(diagnosis.ranks),
        "seconds": round(diagnosis.seconds, 3),
        "world_size": world_size,
        "time": time.time(),
    }


def silent_hosts_row(hosts: Mapping[int, str], *, step: int, world_size: int) -> JournalRow:
    """Builds a row of `faults.jsonl` for hosts that do not answer the other hosts' agents.

    Args:
        hosts: rank -> host, for the ranks on these hosts, in ascending order.
        step: step of the newest checkpoint; the step that these ranks had reached is not known.
        world_size: number of ranks.
    """
    return {
        "kind": "event",
        "step": step,
        "event": "fault",
        "fault": "silent",
        "ranks": [{"rank": rank, "host": host} for rank, host in list(hosts.items())[:_RECORDED]],
        **_other_ranks(tuple(hosts)),
        "world_size": world_size,
        "time": time.time(),
    }


def print_report(text: str) -> None:
    """Writes the report to the launcher's error file if there is one, otherwise to stderr."""
    if ERROR_FILE in os.environ:
        Path(os.environ[ERROR_FILE]).write_text(text)
        return
    start = "\n" if sys.stderr.isatty() else ""  # below a progress bar
    print(f"{start}{text}", file=sys.stderr, flush=True)


def append_fault_once(run_dir: Path, row: Mapping[str, Any], *, token: str, master: str = "") -> bool:
    """Appends the row, unless another process of the start has done so; returns whether this process did.

    Returns True also if the file system does not respond or has no locks: two reports are better than none.

    Args:
        run_dir: the run's directory.
        row: the row.
        token: token that is the same in all processes of the start.
        master: address:port of the rendezvous, which agents use as the token of their rows. Agents write their row
            before they end the ranks of a start, so what the ranks then report is not recorded as the fault.
    """
    tokens = (token, master) if master else (token,)
    return with_timeout(3.0, lambda: _append(run_dir / FILE_NAME, {**row, "start": token}, tokens), default=True)


def read_faults(run_dir: str | Path) -> list[JournalRow]:
    """Reads the faults of a run, oldest first."""
    path = Path(run_dir) / FILE_NAME
    rows = map(json_row, path.read_bytes().splitlines() if path.exists() else ())
    return [row for row in rows if row is not None]  # without partial lines, which a full disk leaves


def with_timeout(seconds: float, action: Callable[[], T], *, default: T) -> T:
    """Runs `action`; returns `default` if it raises OSError or exceeds the time, as on a dead file system."""
    results: list[T] = []

    def act() -> None:
        try:
            results.append(action())
        except OSError:
            results.append(default)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else default


def _other_ranks(ranks: Sequence[int]) -> dict[str, Any]:
    """Builds columns for the ranks at fault that a row does not describe."""
    further = ranks[_RECORDED:]
    return {"further": len(further), "further_ranks": _rank_ranges(further)} if further else {}


def _append(path: Path, row: Mapping[str, Any], tokens: Sequence[str]) -> bool:
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(max(0, file.seek(0, os.SEEK_END) - _OWN_ROWS))
        known = file.read()
        if any(f'"start": "{token}"'.encode() in known for token in tokens):
            return False
        last_line_complete = not known or known.endswith(b"\n")
        file.write((("" if last_line_complete else "\n") + json.dumps(row) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    return True


def _headline(diagnosis: Diagnosis, at_fault: Sequence[RankStatus], world_size: int) -> str:
    first = at_fault[0]
    pid = f" (pid {first.pid})" if first.pid else ""
    rank = f"rank {first.rank} of {world_size} on {first.host}{pid}"
    more = f"; the same for {_rank_ranges(s.rank for s in at_fault[1:])}" if len(at_fault) > 1 else ""
    position = f"at step {first.step}, in {first.phase}"
    match diagnosis.kind:
        case "died":
            return f"{rank} died {position}; its last heartbeat was {diagnosis.seconds:.1f} s before{more}"
        case "silent":
            return f"{rank} has sent no heartbeat for {diagnosis.seconds:.1f} s; it was {position}{more}"
        case "lost":
            return f"{rank} lost its connection to another rank {position}{more}"
        case "stuck":
            return f"{rank} hangs {position}, without progress for {diagnosis.seconds:.1f} s{more}"
        case _:
            return f"{rank} failed {position}: {first.error}"


def _why(diagnosis: Diagnosis, first: RankStatus) -> str:
    if diagnosis.kind == "died":
        return "its connection closed unexpectedly, as after kill -9, a crash or the kernel's out-of-memory killer"
    if diagnosis.kind == "failed":
        return "an error of its own; that rank prints it in full"
    if diagnosis.kind == "lost":
        return f"no rank has died or failed by itself, but: {first.error}"
    if first.gil_held:
        return "a call holds Python's interpreter lock (GIL), so that not even its heartbeat thread runs"
    if diagnosis.kind == "stuck":
        return "no rank makes progress; this rank is behind the others, or is not waiting for them"
    state = state_of(first.pid)[0] if first.machine == machine() else ""
    return _STATES.get(state, "it is stopped, or its host or the network to it is down")


def _remedy(diagnosis: Diagnosis, first: RankStatus) -> str:
    restart = "start again: the run resumes from its newest checkpoint"
    match diagnosis.kind:
        case "died":
            return f"look for 'Out of memory' or a crash in `dmesg` on {first.host}; {restart}"
        case "silent":
            return f"check {first.host}; {restart}. Raise watchdog.heartbeat_timeout if this was no fault"
        case "lost":
            return f"{restart}. If it happens again, check the network between the hosts, and {first.host}'s cards"
        case "stuck":
            dumps = "flight-recorder-rank-* in the run's directory has the last collectives of every rank"
            return f"{restart}. Raise watchdog.hang_timeout if this phase may take so long. {dumps}"
        case _:
            return f"fix that error; {restart}"


def _stack(status: RankStatus, when: str) -> list[str]:
    if not status.stack:
        return [f"  rank {status.rank} has sent no stack yet"]
    calls = [f"    {call}" for call in status.stack]
    return [f"  where rank {status.rank} {when} (innermost call first):", *calls]


def _collectives(statuses: Sequence[RankStatus]) -> list[str]:
    """Tells which ranks wait in which collective, as far as they have reported it, one line per collective."""
    groups: dict[str, list[int]] = {}
    for status in statuses:
        if status.collective:
            groups.setdefault(status.collective, []).append(status.rank)
    lines = [f"  waiting in {collective}: {_rank_ranges(ranks)}" for collective, ranks in groups.items()]
    return lines[:_SHOWN] + (["  ..."] if len(lines) > _SHOWN else [])


def _positions(statuses: Sequence[RankStatus]) -> str:
    """Groups ranks by position: "ranks 0, 2-7 at step 17, in training"."""
    groups: dict[tuple[int, str], list[int]] = {}
    for status in sorted(statuses, key=lambda status: status.rank):
        groups.setdefault((status.step, status.phase), []).append(status.rank)
    parts = [f"{_rank_ranges(ranks)} at step {step}, in {phase}" for (step, phase), ranks in groups.items()]
    return "; ".join(parts[:8]) + ("; ..." if len(parts) > 8 else "")


def _rank_ranges(numbers: Iterable[int]) -> str:
    """Formats ranks as ranges: "ranks 0, 2-7"."""
    ranks = sorted(numbers)
    members = set(ranks)
    starts = [rank for rank in ranks if rank - 1 not in members]
    ends = [rank for rank in ranks if rank + 1 not in members]
    ranges = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranges[:12])}" + (", ..." if len(ranges) > 12 else "")
