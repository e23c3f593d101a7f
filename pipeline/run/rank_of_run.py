"""A rank that trains, as one value: for the loop, its hooks, and its island or replica."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.base import Engine
from pipeline.run.attempts import Attempt
from pipeline.run.prepare import PreparedRun
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import StopSignals
from pipeline.runtime.faults.watchdog import Watchdog
from pipeline.runtime.metrics.console import TrainingDisplay
from pipeline.runtime.metrics.sinks import Sinks


@dataclass(frozen=True, kw_only=True)
class RankOfRun:
    """One rank of a run that trains.

    Attributes:
        prepared: the run: its config, its data, its model on meta, its checkpoints.
        rank: rank of this process in the run.
        engine: executes the steps.
        agreement: all-reduces small numbers over the ranks of the run.
        signals: stop signals of this process.
        watchdog: watchdog that gets this rank's phase and step.
        attempt: journal of the attempts of the run.
        sinks: journal and tracking services, for metrics and events; empty on all ranks but rank 0.
        display: progress bar and messages; silent on all ranks but rank 0.
        checkpoint: checkpoint from which the run resumes; None at the start.
        stack: exit stack that closes everything opened for the run.
    """

    prepared: PreparedRun
    rank: int
    engine: Engine
    agreement: Agreement
    signals: StopSignals
    watchdog: Watchdog
    attempt: Attempt
    sinks: Sinks
    display: TrainingDisplay
    checkpoint: Checkpoint | None
    stack: ExitStack

    @property
    def run(self) -> ResolvedRun:
        """The resolved config."""
        return self.prepared.run

    @property
    def curve(self) -> dict[str, Any]:
        """The fields that determine the loss curve, on which all groups of a run must agree."""
        return self.prepared.curve

    @property
    def done(self) -> int:
        """Number of finished steps at the start of this attempt."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def record(self, step: int, **values: Any) -> None:
        """Hands an event to the journal and to tracking services."""
        self.sinks.event(step, **values)

    def say(self, line: str) -> None:
        """Prints a line on rank 0."""
        self.display.say(line)
