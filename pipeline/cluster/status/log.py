"""The merged log of a run: all attempts and ranks, in the order of time.

Entries of `attempts.jsonl`, `faults.jsonl` and `metrics.jsonl` have times. Text logs are `*.log`, their rotated
`*.log.1` and `*.out` in the run's and the agents' directories, and the output of its Slurm jobs. A line without a time
at its beginning takes the time of the line before; a file without any times takes the time of its last change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from foundation.foreign_json import json_row
from pipeline.cluster.status.agents import folders_of
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.goodput.attempts import fault_line
from pipeline.runtime.metrics.attempts_journal import read_events
from pipeline.runtime.metrics.journal import NAME as METRICS
from pipeline.runtime.metrics.times import seconds_of

_STEP_INTERVAL_S = 10.0
"""Seconds between two steps that are shown, as on the console of a run."""
_TAIL_BYTES = 1 << 20
"""Bytes that are read at the end of each text log."""
_TIME = re.compile(r"^\W?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)")
_HIDDEN = frozenset({"time", "attempt", "event", "kind", "step", "pid"})


@dataclass(frozen=True, order=True)
class LogEntry:
    """A line of the merged log; entries are in the order of `time`, which is in seconds since the epoch."""

    time: float
    source: str
    text: str


def merged_log(run_dir: Path, *, outputs: Sequence[Path] = ()) -> list[LogEntry]:
    """Returns all entries of the merged log, oldest first.

    Args:
        run_dir: the run's directory.
        outputs: text logs elsewhere, such as the output of Slurm jobs.
    """
    agents = folders_of(run_dir)
    folders = [run_dir, *agents, *(folder / "logs" for folder in agents)]
    files = [path for folder in folders for glob in ("*.log", "*.log.1", "*.out") for path in sorted(folder.glob(glob))]
    entries = [*_attempts(run_dir), *_faults(run_dir), *_metrics(run_dir)]
    for path in {path.resolve(): path for path in [*files, *outputs]}.values():
        entries.extend(_text(path))
    return sorted(entries, key=lambda entry: entry.time)


def log_lines(entries: Sequence[LogEntry]) -> Iterator[str]:
    """Formats entries with their local time and source."""
    width = max((len(entry.source) for entry in entries), default=0)
    for entry in entries:
        stamp = datetime.fromtimestamp(entry.time).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        yield f"{stamp}  {entry.source:<{width}}  {entry.text}"


def _attempts(run_dir: Path) -> Iterator[LogEntry]:
    events, _ = read_events(run_dir)
    numbers: dict[Any, int] = {}
    for event in events:
        number = numbers.setdefault(event.get("attempt"), len(numbers) + 1)
        step = f" after step {event['step']}" if "step" in event else ""
        yield from _entry(event, f"attempt {number}", f"{event['event']}{step}{_fields(event)}")


def _faults(run_dir: Path) -> Iterator[LogEntry]:
    for row in read_faults(run_dir):
        first = (row.get("ranks") or [{}])[0]
        source = f"rank {first.get('rank', '?')}"
        yield from _entry(row, source, fault_line(row))
        for call in first.get("stack", []):
            yield from _entry(row, source, f"    {call}")


def _metrics(run_dir: Path) -> Iterator[LogEntry]:
    path, shown = run_dir / METRICS, float("-inf")
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        row = json_row(text) or {}
        try:
            kind, step, time = row["kind"], row["step"], seconds_of(row["time"])
        except (ValueError, TypeError, KeyError):
            continue
        if time is None or (kind == "step" and time < shown + _STEP_INTERVAL_S):
            continue
        if kind == "step":
            shown, what = time, f"loss {row.get('loss', float('nan')):.4f}"
        else:
            what = f"{row['event'] if kind == 'event' else 'held-out'}{_fields(row)}"
        yield from _entry(row, "rank 0", f"step {step}: {what}")


def _entry(row: Mapping[str, Any], source: str, text: str) -> Iterator[LogEntry]:
    time = seconds_of(row.get("time"))
    if time is not None:
        yield LogEntry(time, source, text)


def _fields(row: Mapping[str, Any]) -> str:
    shown = [f"{key} {_short(value)}" for key, value in row.items() if key not in _HIDDEN]
    return f": {', '.join(shown)}" if shown else ""


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(path: Path) -> Iterator[LogEntry]:
    """Yields the lines of a text log, each with the last time found at or before it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[size > _TAIL_BYTES :]
        changed = path.stat().st_mtime
    except OSError:
        return
    times = [_time_of(line) for line in lines]
    now = next((time for time in times if time is not None), changed)
    for text, time in zip(lines, times, strict=True):
        now = now if time is None else time
        if text.strip():
            yield LogEntry(now, path.name, text.rpartition("\r")[2].rstrip())


def _time_of(text: str) -> float | None:
    found = _TIME.match(text)
    return seconds_of(found[1].replace(",", ".")) if found else None
