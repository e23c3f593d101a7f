"""Stragglers (ranks for which all others wait), in the journal and on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from pipeline.data.micro_batch import StepBatch
from pipeline.run.hooks.hook import Hook, HookContext
from pipeline.run.rank_of_run import RankOfRun
from pipeline.runtime.metrics.stragglers import Stragglers, peers_of, report_interval, report_seconds


def make(context: HookContext) -> Hook:
    """Makes the hook."""
    here, run = context.here, context.here.run
    section, layers = run.config.stragglers, int(here.prepared.hf_config.get("num_hidden_layers") or 0)
    stragglers = Stragglers(
        threshold=section.threshold,
        every=report_interval(section, seconds=report_seconds(run.topology, run.batch, layers=layers)),
        peers=peers_of(run.topology),
        rank=here.rank,
        gpu=torch.cuda.is_available(),
    )
    return StragglerReports(stragglers, here)


class StragglerReports(Hook):
    """Measures this rank's own time, and reports ranks that take longer than their peers.

    Args:
        here: this rank of the run, which records events and prints lines.
    """

    def __init__(self, stragglers: Stragglers, here: RankOfRun) -> None:
        self._stragglers, self._here = stragglers, here

    def batches(self, steps: Iterable[StepBatch]) -> Iterable[StepBatch]:
        """Measures how long the loader takes."""
        return self._stragglers.timed(steps)

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[StepBatch]:
        """Measures this rank's own time in the step."""
        with self._stragglers.measured(batch.step):
            yield batch

    def needs_finished(self, step: int) -> bool:
        """Tells whether the next step is profiled: a profile must have only the kernels of its own step."""
        return self._stragglers.profiles(step + 1)

    def after_step(self, step: int) -> None:
        """Gathers and reports own times at report steps."""
        report = self._stragglers.report(step)
        if report is not None:
            self._here.record(step, event="stragglers", **report.row())
            for line in report.lines():
                self._here.say(line)
