"""Protocol of a group of processes that trains one model with others: an island or a replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from pipeline.checkpoint.format.shard_table import State
from pipeline.data.micro_batch import StepBatch
from pipeline.runtime.faults.stop_signals import Stop


class Group(Protocol):
    """The island (low-communication training) or replica of the model to which this process belongs.

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
        """Share of the step's batch that this group ran; 1 for an island, which has its own batch."""
        ...

    def start(self) -> Stop:
        """Joins the other groups, which may change `step`. Returns a stop that was requested meanwhile."""
        ...

    def batches(self) -> Iterator[StepBatch]:
        """Yields this rank's batches."""
        ...

    def due(self, step: int) -> bool:
        """Tells whether there is an exchange after a step."""
        ...

    def exchange(self, step: int) -> Stop:
        """Exchanges with the other groups; returns a stop that was requested meanwhile. Collective."""
        ...

    def settle(self, step: int, stop: Stop) -> Stop:
        """Ends a background exchange before a checkpoint; returns the requested stop. Collective."""
        ...

    def leave(self) -> None:
        """Leaves before the run's last step: other replicas do not wait until this one's state is saved."""
        ...

    def state(self) -> State:
        """Returns the state to save: the engine's, and an island's outer state. Collective."""
        ...

    def details(self) -> dict[str, Any]:
        """Returns the group's entry in a checkpoint's manifest."""
        ...
