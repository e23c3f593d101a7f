"""The student's own samples, generated before a step begins (on-policy distillation)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.data.micro_batch import StepBatch
from pipeline.run.distillation.on_policy import OnPolicySamples
from pipeline.run.distillation.on_rank import make_samples
from pipeline.run.hooks.hook import Hook, HookContext, StepNumbers
from pipeline.runtime.faults.watchdog import Watchdog


def make(context: HookContext) -> Hook:
    """Makes the hook."""
    here = context.here
    samples = make_samples(
        here.prepared,
        here.engine,
        rank=here.rank,
        device=here.agreement.device,
        on_progress=here.watchdog.report_progress,
    )
    return StudentSamples(samples, here.watchdog)


class StudentSamples(Hook):
    """Completes every step's batch with samples that the student continues.

    Args:
        watchdog: watchdog that gets the phase when this rank generates.
    """

    def __init__(self, samples: OnPolicySamples, watchdog: Watchdog) -> None:
        self._samples, self._watchdog = samples, watchdog

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[StepBatch]:
        """Completes the batch."""
        self._watchdog.enter_phase("generating", batch.step)
        whole = self._samples.complete(batch)
        self._watchdog.enter_phase("training", batch.step)
        yield whole

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:
        """Adds values about the samples and the parts of the loss to the step's row."""
        numbers.parts = self._samples.figures(numbers.step, numbers.parts, seconds=numbers.cost.seconds)
