"""One island of a run: joins the others, takes its samples from the round's deal, and exchanges pseudo-gradients.

An exchange is tried again, without those that have died, until it succeeds on all ranks of the island. What an island
that missed an exchange has trained meanwhile is dropped: it takes the state of one that did not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.shard_table import State
from pipeline.data.loader import StepBatch
from pipeline.faults.stop import Stop
from pipeline.islands.exchange import Exchange
from pipeline.islands.ledger import Ledger, Member, compatible
from pipeline.islands.lighthouse import LighthouseMember, Quorum, refuse_other_secret
from pipeline.islands.outer import OuterState
from pipeline.islands.peers import Peers
from pipeline.islands.report import over_ranks, report_exchange
from pipeline.islands.surroundings import Loader, Surroundings

_AGAIN_S = 0.5


class Island:
    """See the module's docstring. Every method is collective over the ranks of the island.

    Args:
        around: its rank and run.
        peers: the same ranks of the other islands.
        lighthouse: on rank 0; None on the others.
        loader: makes this rank's batches.
        step: inner steps that the engine's state has.

    Attributes:
        ledger: where the island stands.
        step: inner steps done.
    """

    def __init__(
        self, around: Surroundings, *, peers: Peers, lighthouse: LighthouseMember | None, loader: Loader, step: int
    ) -> None:
        self._around, self._loader, self._living, self._waited = around, loader, False, False
        self.step, self.ledger, self.name = step, Ledger(), around.name
        with around.engine.edit_state() as state:
            self._outer = OuterState(state, around.section.outer)
        self._exchange = Exchange(around, peers=peers, lighthouse=lighthouse, outer=self._outer)

    def state(self) -> State:
        """The engine's state with the outer state, for a checkpoint."""
        state = self._around.engine.state()
        with self._around.engine.edit_state() as whole:
            outer = self._outer.named(whole)
        # of tied weights, one of the ranks that have a copy writes it
        written = {key for key in outer if named_state.weight_key(key.partition("/")[2]) in state}
        return {**state, **{key: value for key, value in outer.items() if key in written}}

    def details(self) -> dict[str, Any]:
        """What the manifest of a checkpoint records."""
        return {"name": self.name, **self.ledger.plain()}

    def load(self, directory: Path, details: dict[str, Any] | None) -> None:
        """Loads the outer state of a checkpoint; of an ordinary run's, the outer optimizer begins afresh.

        Args:
            directory: of the checkpoint.
            details: what `details` has returned when it was saved; None of an ordinary run.
        """
        if details is None:
            return
        with self._around.engine.edit_state() as state:
            outer = self._outer.named(state)
        named_state.read(outer, directory)
        # a folder that another island has written counts as its own: it goes on in that one's place
        ledger = Ledger.from_plain({key: details[key] for key in ("round", "commit", "deal")})
        if ledger.deal is not None and details["name"] != self.name:
            names = tuple(self.name if each == details["name"] else each for each in ledger.deal.names)
            ledger = replace(ledger, deal=replace(ledger.deal, names=names))
        self.ledger = ledger

    def start(self) -> Stop:
        """Joins the islands that live, or begins with those that are started together. Returns a requested stop.

        Raises:
            ConfigError: the other islands have another secret or another layout.
        """
        section, began = self._around.section, time.monotonic()
        while True:
            member = self._member()
            quorum = self._exchange.ask(member)
            if quorum is None:
                return self._exchange.stop
            refuse_other_secret(quorum, name=self.name)
            members = compatible(quorum.members)
            self._refuse_other_layout(members)
            ready = any(each.living or each.waited for each in members)
            if (ready or len(members) >= section.count) and self._take_part(quorum, member, began):
                return Stop.NO
            self._waited = self._around.agreed(time.monotonic() - began > section.start_s)
            time.sleep(_AGAIN_S)

    def due(self, step: int) -> bool:
        """Whether there is an exchange after an inner step."""
        deal = self.ledger.deal
        return deal is not None and self.name in deal.names and step == deal.last_step

    def exchange(self, step: int) -> Stop:
        """Exchanges pseudo-gradients, and takes the state of another island where this one missed an exchange.

        Args:
            step: inner steps done.

        Returns:
            A stop that was requested while it waited; the exchange has not taken place then.
        """
        self.step, began = step, time.monotonic()
        while True:
            self._around.watchdog.enter_phase("waiting for other islands", step)
            member = self._member()
            quorum = self._exchange.ask(member)
            if quorum is None:
                return self._exchange.stop
            if self._take_part(quorum, member, began):
                return Stop.NO

    def batches(self) -> Iterator[StepBatch]:
        """This rank's batches, of one round after the other; `exchange` must be called where it is `due`."""
        while self.step < self._around.total:
            deal = self.ledger.deal
            assert deal is not None
            slots, done = deal.slots(self.name), self.step - deal.step
            if not slots or done >= len(slots):  # this island came in the middle of a round
                if self.exchange(self.step):
                    return
                continue
            first = slots.start + done + 1
            for number, batch in enumerate(self._loader(first, slots.stop)):
                self.step = deal.step + done + number + 1
                yield replace(batch, step=self.step)

    def close(self) -> None:
        """Leaves: the others do not wait for this island any more."""
        self._exchange.close()

    def _member(self) -> Member:
        return Member(self.name, self.ledger, self.step, self._living, self._waited, self._around.layout)

    def _refuse_other_layout(self, members: tuple[Member, ...]) -> None:
        if self.name not in [each.name for each in members]:
            others = ", ".join(each.name for each in members)
            why = f"{others} split the model over their ranks in another way than {self.name}"
            remedy = "the same engine, ZeRO stage, parallel section and number of processes on all islands"
            raise ConfigError("islands", why=why, remedy=remedy)

    def _take_part(self, quorum: Quorum, member: Member, began: float) -> bool:
        """Does what the quorum decides. Returns whether it has succeeded on all ranks of this island."""
        waited, before, exchanging = time.monotonic() - began, self.ledger, time.monotonic()
        exchanged = self._exchange.attempt(quorum, member)
        if exchanged is None or not self._exchange.finish(exchanged, step=self.step):
            return False
        decision = exchanged.decision
        self.ledger, self._living = decision.ledger, True
        if exchanged.heals or exchanged.mean is not None:
            self.step = decision.step
        sent = int(over_ranks(self._around, self._exchange.bytes_sent))
        costs = {"bytes_sent": sent, "wait_seconds": waited, "seconds": time.monotonic() - exchanging}
        report_exchange(self._around, self.step, decision, quorum, before=before, **costs)
        return True
