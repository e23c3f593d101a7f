"""Measured shares: the samples of steps follow the measured speeds of ranks (`parallel.shares` "auto")."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from pipeline.data.micro_batch import StepBatch
from pipeline.run.hooks.hook import Hook, HookContext
from pipeline.run.rank_of_run import RankOfRun
from pipeline.run.uneven.balance_shares import ShareBalancer, make_balancer, shares_row


def make(context: HookContext) -> Hook:
    """Makes the hook."""
    here = context.here
    assert context.current is not None
    gpu = here.agreement.device.type == "cuda"
    return MeasuredShares(make_balancer(here.run, here.engine, context.current, gpu=gpu, stack=here.stack), here)


class MeasuredShares(Hook):
    """Divides the samples of steps anew if it pays, and reports the change.

    Args:
        here: this rank of the run, which records events and prints lines.
    """

    def __init__(self, balancer: ShareBalancer, here: RankOfRun) -> None:
        self._balancer, self._here = balancer, here

    def start(self, step: int) -> None:
        """Records the shares with which the attempt begins."""
        self._here.record(step, event="shares", **shares_row(self._balancer.shares))

    def step(self, batch: StepBatch) -> AbstractContextManager[StepBatch]:
        """Begins to measure the forward passes of the step."""
        self._balancer.begin(batch)
        return nullcontext(batch)

    def after_step(self, step: int) -> None:
        """Gathers speeds, and divides the samples of the following steps."""
        change = self._balancer.update(step)
        if change is not None:
            self._here.record(step, event="shares", **change.row())
            self._here.say(change.line(step))
