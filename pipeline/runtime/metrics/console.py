"""Console output of a run: a progress bar on a terminal, a line every few seconds in a log file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pipeline.runtime.metrics.memory import show_memory
from pipeline.runtime.metrics.step_clock import StepCost
from pipeline.runtime.metrics.times import clock

LOG_INTERVAL_S = 10.0
_DECAY = 0.9
"""Decay of the smoothed loss: averages about ten steps, enough to see a trend with batches of a few sequences."""

_WIDE = 132
"""Smallest number of columns at which a progress bar has room for memory and data wait."""


class TrainingDisplay:
    """Progress of the steps of a run, on stderr. A context manager; silent unless `shown`.

    Args:
        first: number of steps already done.
        total: steps of the whole run.
        shown: true on the rank that prints, rank 0.
        tokens: tokens of the first n steps, by which time is estimated; None where all steps are alike.
    """

    def __init__(self, *, first: int, total: int, shown: bool, tokens: Callable[[int], int] | None = None) -> None:
        self._console = Console(stderr=True, quiet=not shown)
        self._live = shown and self._console.is_terminal
        self._total, self._shown, self._printed_at = total, shown, 0.0
        self._loss, self._left = SmoothedLoss(), TimeLeft(total, tokens)
        # fits a terminal of 80 columns, so that no number is truncated
        columns = (BarColumn(bar_width=6), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
        self._bar = Progress(*columns, console=self._console, disable=not self._live)
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

    def step(self, step: int, *, loss: float, grad_norm: float, lr: float, cost: StepCost) -> None:
        """Shows a finished step: smoothed loss, gradient norm, learning rate, speed, memory, data wait, time left.

        Args:
            step: number of the step, from 1.
            loss: loss of the step, in nats per token.
            grad_norm: L2 norm of the whole gradient, before clipping.
            lr: learning rate of the step.
            cost: time, speed and peak memory of the step.
        """
        if not self._shown:
            return
        smoothed, left = self._loss.add(loss), self._left.after(step)
        speed = [f"{cost.tokens_per_second:,.0f} tok/s", *([f"MFU {cost.mfu:.1%}"] if cost.mfu else [])]
        needs = [show_memory(cost.memory), f"data wait {cost.data_wait_seconds:.3f} s"]
        if self._live:  # 80 columns have no room for the learning rate, which is known beforehand
            wide = needs if self._console.width >= _WIDE else []
            now = [f"loss {smoothed:.4f}", f"gnorm {grad_norm:.2f}", *speed, *wide, left]
            self._bar.update(self._task, completed=step, now=" ".join(now))
        elif time.monotonic() - self._printed_at > LOG_INTERVAL_S or step == self._total:
            self._printed_at = time.monotonic()
            now = [f"loss {smoothed:.4f}", f"grad norm {grad_norm:.2f}", f"lr {lr:.2e}", *speed, *filter(None, needs)]
            self.say("  ".join([f"step {step}/{self._total}", *now, *([f"{left} left"] if left else [])]))


class SmoothedLoss:
    """Exponential moving average of the loss, corrected for its start at 0 (Kingma and Ba, arXiv:1412.6980, sec. 3)."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, loss: float) -> float:
        """Adds a step's loss and returns the average; a non-finite loss is returned unchanged and not averaged."""
        if not math.isfinite(loss):
            return loss
        self._sum = _DECAY * self._sum + (1 - _DECAY) * loss
        self._weight = _DECAY * self._weight + (1 - _DECAY)
        return self._sum / self._weight


class TimeLeft:
    """Estimate of a run's remaining wall time, evaluations and checkpoints included.

    The first step of a process is not counted: it also compiles, allocates and connects.

    Args:
        total: steps of the whole run.
        work: work of the first n steps, to which their time is proportional; None for the number of steps.
    """

    def __init__(self, total: int, work: Callable[[int], int] | None = None) -> None:
        self._total, self._work = total, work or (lambda step: step)
        self._first: tuple[int, float] | None = None

    def after(self, step: int) -> str:
        """Formats the time left as H:MM:SS, with days if over a day; empty while unknown and after the last step."""
        now = time.monotonic()
        if self._first is None or step <= self._first[0]:  # the estimate begins anew after a rollback
            self._first = step, now
            return ""
        work, seconds = self._work, now - self._first[1]
        rate = seconds / (work(step) - work(self._first[0]))
        return clock(rate * (work(self._total) - work(step))) if step < self._total else ""
