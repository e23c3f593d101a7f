"""The rank and the run of an island, as one value."""

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
"""Function that records an event in the journal, given a step and the event's values."""
Loader = Callable[[int, int], Iterable[StepBatch]]
"""Function that returns the batches of the data steps from a first to a last one, counted from 1."""


@dataclass(frozen=True)
class IslandContext:
    """The rank and the run of an island.

    Attributes:
        section: the config's `islands`, with a name.
        total: number of inner steps of the run.
        schedule: schedule of the inner learning rate.
        samples: global batch size of one island, in samples.
        layout: digest of the keys that determine the loss curve, and of the shards on all ranks (see `Member.layout`).
        rank: rank of this process in the island.
        engine: executes the inner steps.
        agreement: all-reduces small numbers over the ranks of the island.
        signals: stop signals of this process.
        record: records an event in the journal; ignored on all ranks but rank 0.
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
        """Name of this island."""
        assert self.section.name is not None
        return self.section.name

    def agreed(self, failed: bool) -> bool:
        """Tells whether `failed` is true on any rank of the island. Collective."""
        return bool(self.agreement.max_over_ranks(int(failed))[0])
