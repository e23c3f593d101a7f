"""Graphs compiled during a step, which explain a slow step."""

from __future__ import annotations

from pipeline.engines.parallel.compilation import compilation_clock
from pipeline.run.hooks.hook import Hook, HookContext, StepNumbers
from pipeline.run.rank_of_run import RankOfRun


def make(context: HookContext) -> Hook:
    """Makes the hook."""
    return Compilations(context.here)


class Compilations(Hook):
    """Reports compilations.

    Args:
        here: this rank of the run, which records events and prints lines.
    """

    def __init__(self, here: RankOfRun) -> None:
        self._here, self._take = here, compilation_clock(here.run.config.compile)

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:
        """Counts and reports the graphs that were compiled since the previous step."""
        numbers.graphs, seconds = self._take()
        if numbers.graphs:
            self._here.record(numbers.step, event="compiled", graphs=numbers.graphs, seconds=seconds)
            self._here.say(f"step {numbers.step}: {numbers.graphs} graphs compiled in {seconds:.1f} s")
