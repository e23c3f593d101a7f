"""Telling how far a job is: one rich bar on a terminal, a plain line every ten seconds elsewhere (both on stderr)."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from data_prep.tasks.base import Counts

_PLAIN_EVERY_S = 10.0


class Display:
    """Counts of one phase. Rates are of this process since it began, over what it did itself.

    MB are 10^6 bytes of UTF-8 text; the share done and the time left go by bytes of input as stored.
    """

    def __init__(self, phase: str, *, total_bytes: int = 0, done_bytes: int = 0, total_tokens: int = 0) -> None:
        """`done_bytes` of `total_bytes` were finished by an earlier run. A phase without input goes by its tokens."""
        self.phase, self.total_bytes, self.done_bytes, self.total_tokens = phase, total_bytes, done_bytes, total_tokens
        self.counts = Counts()
        self.began = time.monotonic()
        self.ended: float | None = None
        self._said = self.began
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}% {task.fields[line]}"),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            # without bytes to count, the bar moves to and fro
            self._task = self._bar.add_task(
                phase, total=total_bytes or total_tokens or None, completed=done_bytes, line=""
            )

    def add(self, counts: Counts) -> None:
        """Adds what was done since the last call and shows it when it is time."""
        self.counts = self.counts + counts
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done(), line=self.line())
        elif time.monotonic() - self._said >= _PLAIN_EVERY_S:
            self._said = time.monotonic()
            share = 100 * self._done() / (self.total_bytes or self.total_tokens or 1)
            print(f"{self.phase}: {share:.0f}% {self.line()}", file=sys.stderr, flush=True)

    def line(self) -> str:
        """MB/s, documents, tokens and the time left."""
        c = self.counts
        left = self._seconds_left()
        eta = "" if left is None else f", {left // 60:.0f}:{left % 60:02.0f} left"
        rate = f"{self.mb_per_s():.2f} MB/s, " if self.total_bytes else ""
        return f"{rate}{c.documents:,} documents, {c.tokens:,} tokens{eta}"

    def seconds(self) -> float:
        """Since the phase began in this process, until it ended."""
        return (self.ended or time.monotonic()) - self.began

    def mb_per_s(self) -> float:
        """10^6 bytes of text per second."""
        return self.counts.text_bytes / 1e6 / max(self.seconds(), 1e-9)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.ended = time.monotonic()
        if self._bar is not None:
            self._bar.stop()

    def _done(self) -> int:
        return self.done_bytes + self.counts.input_bytes if self.total_bytes else self.counts.tokens

    def _seconds_left(self) -> float | None:
        if not self.counts.input_bytes:
            return None
        return self.seconds() * (self.total_bytes - self._done()) / self.counts.input_bytes
