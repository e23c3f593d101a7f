"""The row of a step in the journal and in tracking services, and its line on the terminal."""

from __future__ import annotations

import math
from typing import Any

from pipeline.engines.base import StepResult
from pipeline.run.hooks.hook import Hook, HookContext, StepNumbers
from pipeline.run.rank_of_run import RankOfRun


def make(context: HookContext) -> Hook:
    """Makes the hook."""
    return StepMetrics(context.here)


class StepMetrics(Hook):
    """Reports a step's numbers after the earlier hooks have completed them.

    Args:
        here: this rank of the run, which gets the rows, events and lines.
    """

    def __init__(self, here: RankOfRun) -> None:
        self._here = here

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:
        """Writes the row and the line."""
        step, result, cost = numbers.step, numbers.result, numbers.cost
        accounts, lr = self._here.run.accounts, self._here.run.schedule.lr(step)
        if math.isnan(result.loss) and not result.skipped:
            self._here.record(step, event="no_targets")
            self._here.say(f"step {step}: no token of its batch is a target (loss mask): it has no loss")
        self._here.sinks.write(
            "step",
            step,
            samples=accounts.samples(step),
            tokens=accounts.tokens(step),
            **({"stage": stage} if (stage := accounts.name(step)) else {}),
            loss=result.loss,
            **numbers.parts,
            lr=lr,
            **_health(result),
            **cost.row(),
        )
        self._here.display.step(step, loss=result.loss, grad_norm=result.grad_norm, lr=lr, cost=cost)


def _health(result: StepResult) -> dict[str, Any]:
    """Returns a finite gradient norm, fp16's loss scale, and why an update was skipped."""
    fp16 = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
    norm = {"grad_norm": result.grad_norm} if math.isfinite(result.grad_norm) else {}
    return {**({"skipped": True, "outcome": result.outcome} if result.skipped else {}), **norm, **fp16}
