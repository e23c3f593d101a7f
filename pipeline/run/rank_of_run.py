"""A rank that trains, as one value: for the island or the replica of the model that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.base import Engine
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import StopSignals
from pipeline.runtime.faults.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class RankOfRun:
    """One rank of a run that trains.

    Attributes:
        run: the resolved config.
        rank: rank of this process in the run.
        curve: the fields that decide the loss curve: what all groups of one run must agree on.
        engine: executes the steps.
        agreement: all-reduces small numbers over the ranks of the run.
        signals: stop signals of this process.
        record: takes a step and the values of an event of the journal; ignored on all ranks but rank 0.
        say: prints a line on rank 0.
        checkpoint: the checkpoint that the run resumes from; None at the start.
        stack: closes what is opened for the run.
    """

    run: ResolvedRun
    rank: int
    curve: dict[str, Any]
    engine: Engine
    agreement: Agreement
    signals: StopSignals
    watchdog: Watchdog
    record: Callable[..., None]
    say: Callable[[str], None]
    checkpoint: Checkpoint | None
    stack: ExitStack
