"""Metrics journal `metrics.jsonl`: one JSON object per line, appended during the run. Always written, needs no service.

Rows have a `kind`: `step` (loss, lr, grad_norm, ...), `eval` (held-out loss, ...), `task/NAME` (accuracy, ...), `event`
(resumed, finished, ...); the `step` to which they belong; and the `time` of writing, UTC in ISO 8601, with
milliseconds. A process that dies may leave a partial line, and rows of steps that the resumed run repeats. Opening the
journal at step k removes both: the file is then that of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from foundation.errors import TrainingError
from foundation.foreign_json import json_row
from pipeline.runtime.metrics.sinks import TASK, JournalRow
from pipeline.runtime.metrics.time_sums import SumsByAttempt, TimeSums
from pipeline.runtime.metrics.times import iso_time

NAME = "metrics.jsonl"
_BEGIN = b'{"kind": "'
"""Beginning of a row."""
_TAIL = 1 << 20
"""Bytes at the end of a journal that are searched first for the step from which a run resumes."""
_SHOWN = 8
"""Number of damaged lines that a warning lists."""


class Journal:
    """Appends rows to a run's metrics.jsonl. On a full disk rows stay in memory until there is room.

    Args:
        run_dir: the run's directory.
        from_step: step after which rows are removed first; 0 for a new run.
        on_removed: called before rows of steps are removed, with their sums, one for each attempt that wrote rows.

    Raises:
        TrainingError: the file cannot be written.
    """

    def __init__(
        self, run_dir: Path, *, from_step: int, on_removed: Callable[[Sequence[TimeSums]], None] = lambda _removed: None
    ) -> None:
        self._path, self._unwritten, self._warned = run_dir / NAME, b"", False
        self._lock = threading.Lock()
        try:
            _truncate(self._path, from_step, on_removed)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written: {error}\n  try: free space there, then start again"
            ) from None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Appends a row and hands it to the operating system at once: it survives a crash of the process."""
        row = {"kind": kind, "step": step, "time": iso_time(time.time()), **values}
        with self._lock:
            self._unwritten += json.dumps(row).encode() + b"\n"
            self._write_out()

    def require_written(self) -> None:
        """Makes sure that no row is in memory alone: a checkpoint without the rows of its steps would lose them.

        Raises:
            TrainingError: the file cannot be written.
        """
        with self._lock:
            self._write_out()
            if self._unwritten:
                raise TrainingError(f"rows of {self._path} could not be written")

    def close(self) -> None:
        """Flushes to disk."""
        self._write_out()
        with suppress(OSError), self._file:
            os.fsync(self._file.fileno())

    def _write_out(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._warned:
                print(
                    f"warning: {self._path} cannot be written ({error}): rows are kept in memory",
                    file=sys.stderr,
                    flush=True,
                )
        self._warned = bool(self._unwritten)


def read_rows(run_dir: str | Path, *, kind: str | Collection[str] | None = None) -> list[JournalRow]:
    """Reads the rows of a run's journal in order; skips a partial last line, and damaged lines with a warning.

    Only rows of the kinds in `kind` are parsed: nearly all rows are steps, and there may be millions. A kind that ends
    in "/" stands for all kinds that begin with it.
    """
    return list(iterate_rows(run_dir, kind=kind))


def iterate_rows(run_dir: str | Path, *, kind: str | Collection[str] | None = None) -> Iterator[JournalRow]:
    """Yields the rows of `read_rows` one by one, since a million rows take a gigabyte. The warning comes at the end."""
    path, damaged = Path(run_dir) / NAME, list[str]()
    kinds = {kind} if isinstance(kind, str) else kind
    wanted = (b"",) if kinds is None else tuple(_BEGIN + each.encode() + b'"' * (each[-1] != "/") for each in kinds)
    for number, line in enumerate(_whole_lines(path), start=1):
        if line.startswith(_BEGIN) and not line.startswith(wanted) and line.endswith(b"}\n"):
            continue
        row = _row(line)
        if row is None:
            damaged.append(str(number))
        elif kinds is None or any(row["kind"] == k or (k[-1] == "/" and row["kind"].startswith(k)) for k in kinds):
            yield row
    if damaged:
        shown = ", ".join(damaged[:_SHOWN]) + (", ..." if len(damaged) > _SHOWN else "")
        print(f"warning: {path} is damaged in line {shown}, which is skipped", file=sys.stderr, flush=True)


def _whole_lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from _whole(file)


def _whole(file: BinaryIO) -> Iterator[bytes]:
    return (line for line in file if line.endswith(b"\n"))


def _truncate(path: Path, from_step: int, on_removed: Callable[[Sequence[TimeSums]], None]) -> None:
    """Removes the rows of later steps. Damaged lines are kept, and do not prevent a resume."""
    if not path.exists():
        return
    removed = SumsByAttempt()
    partial = path.with_name(f".{NAME}.partial")
    with path.open("rb") as file, partial.open("wb") as kept:
        unchanged = _bytes_until(file, from_step)
        file.seek(0)
        while unchanged and (data := file.read(min(unchanged, 1 << 20))):
            kept.write(data)
            unchanged -= len(data)
        for line in _whole(file):
            row = _row(line)
            if row is None or row["step"] <= from_step:
                kept.write(line)
            else:
                removed.add(row)
        kept.flush()
        os.fsync(kept.fileno())
    on_removed([part for part in removed.parts if part.steps])
    partial.replace(path)


def _bytes_until(file: BinaryIO, step: int) -> int:
    """Finds the size of a journal's beginning that ends at the last row of a step up to `step`.

    The search begins at the end of the file, near that row: it need not parse the rows of millions of steps. Rows of
    steps are in order, and an event's row comes after the rows of all earlier steps.
    """
    total = size = file.seek(0, os.SEEK_END)
    size = min(size, _TAIL)
    while size:
        position = file.seek(total - size)
        found = 0
        for line in file:
            row = _row(line) if line.endswith(b"\n") else None
            if row is not None and row["kind"] == "step" and row["step"] <= step:
                found = position
            position += len(line)
        if found or size == total:
            return found
        size = min(4 * size, total)
    return 0


def _row(line: bytes) -> JournalRow | None:
    """Parses the row of a line; None if the line is damaged."""
    row = json_row(line)
    return row if row is not None and "kind" in row and isinstance(row.get("step"), int) else None


def newest_figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, JournalRow]:
    """Returns task -> figures and step of the task's newest row in a journal."""
    left_out = ("kind", "time", "seconds")
    return {
        str(row["kind"]).removeprefix(TASK): {key: value for key, value in row.items() if key not in left_out}
        for row in rows
        if str(row["kind"]).startswith(TASK)
    }
