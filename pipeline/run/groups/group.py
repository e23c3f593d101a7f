"""Protocol of a group of processes that trains one model with others: an island or a replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from pipeline.checkpoint.format.shard_table import State
from pipeline.data.micro_batch import StepBatch
from pipeline.runtime.faults.stop_signals import Stop


class Group(Protocol):
    """The island (low-communication training) or the replica of the model that this process belongs to.

    Attributes:
        excluded_from_step_time: whether an exchange is left out of the time of a step.
    """

    excluded_from_step_time: bool

    @property
    def step(self) -> int:
        """Number of finished steps."""
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
        """Exchanges with the others; returns a stop that was requested while it waited. Collective."""
        ...

    def settle(self, step: int, stop: Stop) -> Stop:
        """Ends an exchange in the background before a checkpoint; returns the requested stop. Collective."""
        ...

    def leave(self) -> None:
        """Leaves before the run's last step: replicas do not wait until its state is saved."""
        ...

    def state(self) -> State:
        """The state to save: the engine's, and an island's outer state. Collective."""
        ...

    def details(self) -> dict[str, Any]:
        """The group's entry in a checkpoint's manifest."""
        ...
