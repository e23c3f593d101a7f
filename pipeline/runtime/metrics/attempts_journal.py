"""Appends to and reads the journal of attempts, `attempts.jsonl`. `pipeline.run.attempts` lists its events."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from foundation.foreign_json import json_row
from pipeline.runtime.metrics.sinks import JournalRow
from pipeline.runtime.metrics.times import iso_time

NAME = "attempts.jsonl"


def append_event(run_dir: Path, event: str, **fields: Any) -> bool:
    """Appends one line in a single write and flushes it to disk; begins a new line after a damaged line without an end.

    Returns:
        Whether it was written: False on a full disk, or in a directory that cannot be written.
    """
    line = json.dumps({"event": event, "time": iso_time(time.time()), **fields}).encode() + b"\n"
    try:
        with (run_dir / NAME).open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            whole = not size or os.pread(file.fileno(), 1, size - 1) == b"\n"
            file.write(line if whole else b"\n" + line)
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def read_events(run_dir: Path) -> tuple[list[JournalRow], int]:
    """Reads the events in order, and the number of damaged lines, which are skipped; no events without a journal."""
    try:
        lines = (run_dir / NAME).read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    parsed = [parse_row(line) for line in lines if line.strip()]
    return [event for event in parsed if event is not None], sum(event is None for event in parsed)


def parse_row(line: bytes, *, key: str = "event") -> JournalRow | None:
    """Parses a line as a JSON object with a time and a text under `key`; None for any other line."""
    row = json_row(line)
    return row if row is not None and isinstance(row.get(key), str) and "time" in row else None
