"""Common part of islands of both modes: the outer state in checkpoints, and the batches of every round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from foundation.directory import Details
from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shard_table import State
from pipeline.data.micro_batch import StepBatch
from pipeline.run.groups.islands.context import IslandContext, Loader
from pipeline.run.groups.islands.ledger import Ledger
from pipeline.run.groups.islands.outer import OuterState
from pipeline.run.groups.islands.ranks import LoopRanks
from pipeline.runtime.faults.stop_signals import Stop


class LocalIsland(ABC):
    """An island as the training loop sees it. Every method is collective over the ranks of the island.

    Args:
        context: the island's rank and run.
        loader: makes this rank's batches.
        step: number of inner steps in the engine's state.

    Attributes:
        ledger: the island's ledger.
        step: number of inner steps done.
        excluded_from_step_time: true, since an exchange is not part of an inner step.
        own_share: share of a step's batch that this island runs: 1, since it has its own batch.
    """

    excluded_from_step_time = True
    own_share = 1.0

    def __init__(self, context: IslandContext, *, loader: Loader, step: int) -> None:
        self._context, self._loader, self._ranks = context, loader, LoopRanks(context)
        self.step, self.ledger, self.name = step, Ledger(), context.name
        with context.engine.edit_state() as state:
            self._outer = OuterState(state, context.section.outer)

    def state(self) -> State:
        """Returns the engine's state with the outer state, for a checkpoint."""
        state = self._context.engine.state()
        with self._context.engine.edit_state() as whole:
            outer = self._outer.named(whole)
        # tied weights are written by one of the ranks with a copy
        written = {key for key in outer if named_state.weight_key(key.partition("/")[2]) in state}
        return {**state, **{key: value for key, value in outer.items() if key in written}}

    def details(self) -> Details:
        """Returns the island's entry in a checkpoint's manifest."""
        # not the checkpoint's step: a later exchange may have taken this island to another round
        return {"island": {"name": self.name, "step": self.step, **self.ledger.plain()}}

    def load(self, directory: Path, details: Details | None, *, samples: int) -> None:
        """Loads a checkpoint's outer state; from an ordinary run's checkpoint the outer optimizer begins afresh.

        Args:
            directory: the checkpoint's directory.
            details: the manifest's `island`; None for an ordinary run.
            samples: number of samples that an ordinary run had consumed, after which the islands continue.
        """
        if details is None:
            self.ledger = Ledger(start=samples // self._context.samples)
            return
        with self._context.engine.edit_state() as state:
            outer = self._outer.named(state)
        named_state.read(outer, directory)
        # an island that loads another island's folder continues in that island's place
        self.ledger = Ledger.from_plain(details).renamed(details["name"], self.name)
        self.step = details.get("step", self.step)

    @abstractmethod
    def start(self) -> Stop:
        """Joins the living islands, or begins with islands started together. Returns a requested stop.

        Raises:
            ConfigError: the other islands have another secret or another layout.
        """

    @abstractmethod
    def exchange(self, step: int) -> Stop:
        """Exchanges pseudo-gradients, and takes another island's state if this one missed an exchange.

        Args:
            step: number of inner steps done.

        Returns:
            A stop that was requested while it waited; the exchange has then not taken place.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves: the other islands no longer wait for this one."""

    def settle(self, step: int, stop: Stop) -> Stop:  # noqa: ARG002
        """Ends a background exchange before a checkpoint is written; by default there is none.

        Args:
            step: number of inner steps done.
            stop: the requested stop, if any; with it, other islands are not waited for.

        Returns:
            `stop`, or a stop that was requested while it waited.
        """
        return stop

    def leave(self) -> None:  # noqa: B027  nothing to do in either mode
        """Does nothing when a run ends before its last step: islands stopped together continue together."""

    def due(self, step: int) -> bool:
        """Tells whether to call `exchange` after an inner step, where an exchange begins or ends."""
        deal = self.ledger.deal
        return deal is not None and self.name in deal.names and step in (deal.snapshot_step, deal.last_step)

    @property
    def _owes_an_exchange(self) -> bool:
        """Whether the island was stopped between the last step of its round (perhaps the run's) and the exchange."""
        deal = self.ledger.deal
        return deal is not None and bool(deal.slots(self.name)) and self.step == deal.last_step

    def batches(self) -> Iterator[StepBatch]:
        """Yields this rank's batches, round after round; `exchange` must be called where it is `due`."""
        while self.step < self._context.total or self._owes_an_exchange:
            deal = self.ledger.deal_of(self.name, self.step)
            assert deal is not None
            slots, done = deal.slots(self.name), self.step - deal.step
            assert done >= 0
            if not slots or done >= len(slots):  # this island joined in the middle of a round
                if self.exchange(self.step):
                    return
                continue
            first = slots.start + done + 1
            for number, batch in enumerate(self._loader(first, slots.stop)):
                if self.ledger.deal_of(self.name, self.step) != deal:  # the island has taken another island's state
                    break
                self.step = deal.step + done + number + 1
                yield replace(batch, step=self.step)
