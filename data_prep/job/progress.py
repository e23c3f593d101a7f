"""Progress of a job: a rich progress bar on a terminal, a plain line every ten seconds elsewhere (both on stderr).

Every process of a job also writes a status note into the job directory once a second, for `status` in another terminal.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data_prep.task import Counts

_PLAIN_LINE_INTERVAL_S = 10.0
_NOTE_INTERVAL_S = 1.0
_SHOWN_REASONS = 3


class Display:
    """Progress and throughput of one phase. Rates count only this process's work since it began the phase.

    MB are 10^6 bytes of UTF-8 text. The share done and the time left are computed from bytes of input as stored.
    """

    def __init__(
        self, phase: str, *, total_bytes: int = 0, done_bytes: int = 0, total_tokens: int = 0, note: Path | None = None
    ) -> None:
        """Starts the clock.

        Args:
            total_bytes: bytes of stored input; 0 for a phase without input, whose progress is measured in tokens.
            done_bytes: bytes of stored input that an earlier run has finished.
            total_tokens: tokens of a phase without input; 0 if unknown.
            note: path of the status note, which `status` reads; None for no note.
        """
        self.phase, self.total_bytes, self.done_bytes, self.total_tokens = phase, total_bytes, done_bytes, total_tokens
        self.counts = Counts()
        self.began = time.monotonic()
        self.ended: float | None = None
        self._printed = self.began
        self._note, self._note_written = note, self.began - _NOTE_INTERVAL_S
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            total = total_bytes or total_tokens or None
            known = (BarColumn(), TextColumn("{task.percentage:>3.0f}% {task.fields[line]}"))
            unknown = (SpinnerColumn(), TimeElapsedColumn())
            self._bar = Progress(
                TextColumn("{task.description}"), *(known if total else unknown), console=console, transient=True
            )
            self._task = self._bar.add_task(phase, total=total, completed=done_bytes, line="")

    def add(self, counts: Counts) -> None:
        """Adds the work since the last call; updates the display and the note when they are due."""
        self.counts = self.counts + counts
        now = time.monotonic()
        if now - self._note_written >= _NOTE_INTERVAL_S:
            self._note_written = now
            self._write_note()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done(), line=self.line())
        elif now - self._printed >= _PLAIN_LINE_INTERVAL_S:
            self._printed = now
            done = f"{100 * self.share():.0f}% {self.line()}" if self._has_total else f"{self.seconds():.0f} s"
            print(f"{self.phase}: {done}", file=sys.stderr, flush=True)

    def line(self) -> str:
        """The line to print: MB/s, documents/s, tokens, dropped documents by reason, and the time left."""
        c, seconds = self.counts, max(self.seconds(), 1e-9)
        rate = f"{self.mb_per_s():.1f} MB/s, " if self.total_bytes else ""
        dropped = sorted(c.dropped.items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped[:_SHOWN_REASONS])
        seconds_left = self._seconds_left()
        eta = "" if seconds_left is None else f", {seconds_left // 60:.0f}:{seconds_left % 60:02.0f} left"
        return (
            f"{rate}{c.documents / seconds:,.0f} documents/s, {c.tokens:,} tokens"
            f"{f', dropped {reasons}' if reasons else ''}{eta}"
        )

    def share(self) -> float:
        """Fraction of the phase that is done, from 0 to 1."""
        return self._done() / (self.total_bytes or self.total_tokens or 1)

    @property
    def _has_total(self) -> bool:
        """Whether the total, and so the fraction done, is known."""
        return bool(self.total_bytes or self.total_tokens)

    def seconds(self) -> float:
        """Seconds since the phase began in this process, until it ended."""
        return (self.ended or time.monotonic()) - self.began

    def mb_per_s(self) -> float:
        """10^6 bytes of text per second."""
        return self.counts.text_bytes / 1e6 / max(self.seconds(), 1e-9)

    def __enter__(self) -> Display:
        self._write_note()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.ended = time.monotonic()
        self._write_note()
        if self._bar is not None:
            self._bar.stop()

    def status_note(self) -> dict[str, Any]:
        """The status note, as JSON."""
        return {
            "phase": self.phase,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "seconds": round(self.seconds(), 3),
            "share": round(self.share(), 4),
            "line": self.line(),
            "ended": self.ended is not None,
        }

    def _write_note(self) -> None:
        if self._note is None:
            return
        partial = self._note.with_name(f".{self._note.name}.partial")
        with suppress(OSError):  # the disk may be full: the tasks raise an error
            self._note.parent.mkdir(exist_ok=True)
            partial.write_text(json.dumps(self.status_note()))
            partial.rename(self._note)

    def _done(self) -> int:
        return self.done_bytes + self.counts.input_bytes if self.total_bytes else self.counts.tokens

    def _seconds_left(self) -> float | None:
        own = self.counts.input_bytes if self.total_bytes else self.counts.tokens
        if not own:
            return None
        return self.seconds() * ((self.total_bytes or self.total_tokens) - self._done()) / own
