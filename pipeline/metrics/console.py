"""Console output of a run: a progress bar on a terminal, a line every few seconds in a log file."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_INTERVAL_S = 10.0


class TrainingDisplay:
    """Progress of the steps of a run, on stderr. A context manager; silent unless `shown`.

    Args:
        first: steps already done.
        total: steps of the whole run.
        shown: true on the rank that prints, rank 0.
    """

    def __init__(self, *, first: int, total: int, shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not shown)
        self._live = shown and self._console.is_terminal
        self._total, self._shown, self._printed_at = total, shown, 0.0
        # fits a terminal of 80 columns, so that no number is truncated
        columns = (BarColumn(bar_width=10), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
        left = (TextColumn("eta"), TimeRemainingColumn(elapsed_when_finished=True))
        self._bar = Progress(*columns, *left, console=self._console, disable=not self._live)
        self._task = self._bar.add_task("training", total=total, completed=first, now="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, *, loss: float, lr: float, tokens_per_second: float, mfu: float | None) -> None:
        """Shows a finished step."""
        now = f"loss {loss:.4f}  lr {lr:.2e}  {tokens_per_second:,.0f} tok/s" + (f"  MFU {mfu:.1%}" if mfu else "")
        if self._live:
            self._bar.update(self._task, completed=step, now=now)
        elif self._shown and (time.monotonic() - self._printed_at > LOG_INTERVAL_S or step == self._total):
            self._printed_at = time.monotonic()
            self.say(f"step {step}/{self._total}  {now}")
