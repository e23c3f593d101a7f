"""The profile of the steps that `profile.steps` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.data.micro_batch import StepBatch
from pipeline.run.hooks.hook import Hook, HookContext, StepNumbers
from pipeline.runtime.metrics.profiling import StepProfiler
from pipeline.runtime.metrics.step_clock import StepClock


def make(context: HookContext) -> Hook:
    """Makes the hook; a profile cut short by an error or a stop is written when the attempt ends."""
    here = context.here
    gpu = here.agreement.device.type == "cuda"
    section, run_dir = here.run.config.profile, here.prepared.run_dir
    profiler = StepProfiler(section, run_dir=run_dir, rank=here.rank, gpu=gpu, say=here.say)
    return Profile(here.stack.enter_context(profiler), context.clock)


class Profile(Hook):
    """Records steps; a profile has only the kernels of its own steps.

    Args:
        clock: step clock, which excludes the start and the end of the profile.
    """

    def __init__(self, profiler: StepProfiler, clock: StepClock) -> None:
        self._profiler, self._clock = profiler, clock

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[StepBatch]:
        """Starts the profile if it begins with this step, and marks the step in it."""
        with self._clock.excluded():
            self._profiler.begin(batch.step)
        with self._profiler.step(batch.step):
            yield batch

    def needs_finished(self, step: int) -> bool:
        """Tells whether the profile begins after this step or ends with it."""
        return self._profiler.begins_with(step + 1) or self._profiler.ends_with(step)

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:
        """Writes the profile after its last step."""
        with self._clock.excluded():
            self._profiler.finish(numbers.step)
