"""What an island has of its rank and its run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.config.schedule import Schedule
from pipeline.config.sections.groups import IslandsSection
from pipeline.data.micro_batch import StepBatch
from pipeline.engines.base import Engine
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.faults.stop_signals import StopSignals
from pipeline.runtime.faults.watchdog import Watchdog

Record = Callable[..., None]
"""Takes a step and the values of an event of the journal."""
Loader = Callable[[int, int], Iterable[StepBatch]]
"""The batches of the data steps from a first to a last one, counted from 1."""


@dataclass(frozen=True)
class IslandContext:
    """What an island has of its rank and its run.

    Attributes:
        section: the config's `islands`; with a name.
        total: inner steps of the run.
        schedule: of the inner learning rate.
        samples: global batch of one island.
        layout: see `Member.layout`.
        rank: of this process in the island.
        engine: executes the inner steps.
        agreement: over the ranks of the island.
        signals: stop signals of this process.
        watchdog: of this process.
        record: see `Record`; ignored on all ranks but rank 0.
        say: prints a line on rank 0.
    """

    section: IslandsSection
    total: int
    schedule: Schedule
    samples: int
    layout: str
    rank: int
    engine: Engine
    agreement: Agreement
    signals: StopSignals
    watchdog: Watchdog
    record: Record
    say: Callable[[str], None]

    @property
    def name(self) -> str:
        """Of this island."""
        assert self.section.name is not None
        return self.section.name

    def agreed(self, failed: bool) -> bool:
        """Whether it is so on any rank of the island. Collective."""
        return bool(self.agreement.max_over_ranks(int(failed))[0])
