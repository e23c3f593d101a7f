"""`metrics.jsonl`: one JSON object per line, appended as a run goes. Always written, needs no service.

Rows have a `kind`: `step` (loss, lr, grad_norm, ...), `eval` (held-out loss, ...), `event` (resumed, finished, ...).
A process that dies may leave rows of steps that are done again after the resume, and half a line. Opening the journal
at step k cuts both off, so the joined file reads as that of a run that was never stopped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.base.errors import TrainingError

NAME = "metrics.jsonl"
_SHOWN = 8
"""Damaged lines that a warning lists."""


class Journal:
    """Appends rows to a run's metrics.jsonl. On a full disk they are kept until there is room: training goes on.

    Args:
        run_dir: the run's directory.
        from_step: rows of later steps are cut off first; 0 for a fresh run.

    Raises:
        TrainingError: the file cannot be written.
    """

    def __init__(self, run_dir: Path, *, from_step: int) -> None:
        self._path, self._kept, self._warned = run_dir / NAME, b"", False
        try:
            _cut(self._path, from_step)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written: {error}\n  try: free space there, then start again"
            ) from None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Appends a row and hands it to the operating system, so that it outlives this process."""
        self._kept += json.dumps({"kind": kind, "step": step, **values}).encode() + b"\n"
        self._hand_over()

    def close(self) -> None:
        """Flushes to disk."""
        self._hand_over()
        with suppress(OSError), self._file:
            os.fsync(self._file.fileno())

    def _hand_over(self) -> None:
        try:
            while self._kept:
                self._kept = self._kept[self._file.write(self._kept) :]
        except OSError as error:
            if not self._warned:
                print(f"warning: {self._path} cannot be written ({error}): rows are kept", file=sys.stderr, flush=True)
        self._warned = bool(self._kept)


def read_rows(run_dir: str | Path, *, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a run's journal in order; half a last line is passed over, and damaged ones with a warning."""
    path = Path(run_dir) / NAME
    rows = [_row(line) for line in _whole_lines(path)]
    if damaged := [str(number) for number, row in enumerate(rows, start=1) if row is None]:
        shown = ", ".join(damaged[:_SHOWN]) + (", ..." if len(damaged) > _SHOWN else "")
        print(f"warning: {path} is damaged in line {shown}, which is passed over", file=sys.stderr, flush=True)
    return [row for row in rows if row is not None and kind in (None, row["kind"])]


def _whole_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _cut(path: Path, from_step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in _whole_lines(path) if _belongs(line, from_step)]
    partial = path.with_name(f".{NAME}.partial")
    with partial.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _belongs(line: bytes, from_step: int) -> bool:
    """Whether a row is of a step up to `from_step`. A damaged line stays as it is: a run must not be lost to it."""
    row = _row(line)
    return row is None or row["step"] <= from_step


def _row(line: bytes) -> dict[str, Any] | None:
    """None of a damaged line: one that no journal has written."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "kind" in row and isinstance(row.get("step"), int) else None
