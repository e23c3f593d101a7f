"""What the training loop is given, as it sees it: held-out data, a student's samples, an island or a replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from pipeline.checkpoint.format.shard_table import State
from pipeline.data.dataset import TokenDataset
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.runtime.faults.stop_signals import Stop


class HeldOutBatches(Protocol):
    """The held-out splits of a run, as one rank reads them."""

    @property
    def heldout(self) -> Sequence[TokenDataset]:
        """The split of every source."""
        ...

    def evaluation(self, dataset: TokenDataset) -> Iterator[MicroBatch]:
        """This rank's batches of a split."""
        ...


class StudentSamples(Protocol):
    """The samples that a student writes before a step is begun (on-policy distillation)."""

    def complete(self, step: StepBatch) -> StepBatch:
        """The step's batch with them. Collective."""
        ...

    def figures(self, step: int, means: dict[str, float], *, seconds: float) -> dict[str, float]:
        """What a step's row of metrics has of them, and of the parts of its loss."""
        ...


class Group(Protocol):
    """An island (low-communication training) or a replica of the model: how this run goes on beside the others.

    Attributes:
        excluded_from_step_time: it is no part of a step.
    """

    excluded_from_step_time: bool

    @property
    def step(self) -> int:
        """Steps done."""
        ...

    @property
    def own_share(self) -> float:
        """Share of the step's batch that was run here; 1 for an island, whose batch is its own."""
        ...

    def start(self) -> Stop:
        """Joins the others; `step` may be another one afterwards. Returns a stop that was requested meanwhile."""
        ...

    def batches(self) -> Iterator[StepBatch]:
        """This rank's batches."""
        ...

    def due(self, step: int) -> bool:
        """Whether there is an exchange after a step."""
        ...

    def exchange(self, step: int) -> Stop:
        """Exchanges. Returns a stop that was requested while it waited. Collective."""
        ...

    def settle(self, step: int, stop: Stop) -> Stop:
        """Ends an exchange in the background before a checkpoint; returns the requested stop. Collective."""
        ...

    def leave(self) -> None:
        """The run ends before its last step: replicas do not wait until its state is saved."""
        ...

    def state(self) -> State:
        """The engine's state and the outer one. Collective."""
        ...

    def details(self) -> dict[str, Any]:
        """What a checkpoint's manifest records."""
        ...
