"""Time, speed and MFU of every step, from report to report. Slow steps are finished one by one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.data.micro_batch import StepBatch
from pipeline.run.groups.group import Group
from pipeline.run.hooks.hook import Hook, HookContext, StepNumbers
from pipeline.runtime.metrics.mfu import mfu, peak_flops
from pipeline.runtime.metrics.step_clock import StepClock, StepCost

SLOW_STEP_S = 5.0
"""Seconds of a step above which it is finished before the next is begun: a stop signal should not wait for two more
steps."""


def make(context: HookContext) -> Hook:
    """Makes the hook."""
    here = context.here
    peak = peak_flops(here.engine.device_name, bf16=here.run.config.bf16.enabled)
    return MeasuredStepTime(context.clock, here.run, context.group, flops=here.prepared.size.flops_per_token, peak=peak)


class MeasuredStepTime(Hook):
    """Measures steps.

    Args:
        clock: step clock, which measures from report to report.
        group: island or replica, which knows its share of a step's batch; None in an ordinary run.
        flops: FLOPs the model spends on one token, forward and backward; None where unknown.
        peak: peak FLOP/s of one device; None where unknown.
    """

    def __init__(
        self, clock: StepClock, run: ResolvedRun, group: Group | None, *, flops: float | None, peak: float | None
    ) -> None:
        self._clock, self._run, self._group, self._flops, self._peak = clock, run, group, flops, peak
        self._slow = False

    def batches(self, steps: Iterable[StepBatch]) -> Iterable[StepBatch]:
        """Measures the wait for each batch."""
        return self._clock.timed(steps)

    def flag(self) -> bool:
        """Tells whether the last step was slow on this rank."""
        return self._clock.last_lap > SLOW_STEP_S

    def needs_finished(self, step: int) -> bool:
        """Tells whether steps are slow on any rank: then no device needs to work ahead."""
        return self._slow

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:
        """Adds the cost of the step: its speed over all ranks, and the MFU of one device."""
        self._slow = raised
        seconds, waited = self._clock.lap()
        rate = self._run.accounts.tokens_in(numbers.step) / seconds
        own = rate if self._group is None else rate * self._group.own_share
        flops, peak = self._flops, self._peak
        used = mfu(own, flops, peak, self._run.topology.world_size) if flops and peak else None
        numbers.cost = StepCost(seconds, waited, rate, used, numbers.memory)

    def outside_step(self) -> AbstractContextManager[None]:
        """Excludes the time of a save, an evaluation or an exchange."""
        return self._clock.excluded()
