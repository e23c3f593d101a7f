"""One island of a run: joins the others, takes its samples from the round's deal, and exchanges pseudo-gradients.

An exchange is tried again, without those that have died, until it succeeds on all ranks of the island. What an island
that missed an exchange has trained meanwhile is dropped: it takes the state of one that did not.

With `islands.overlap` an exchange is begun so many inner steps before the round ends, and runs in a thread. Its outer
update is applied where the round ends, on all ranks after the same step, or before a checkpoint that is due earlier.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from headrace.base.errors import ConfigError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.shard_table import State
from pipeline.data.loader import StepBatch
from pipeline.faults.stop import Stop
from pipeline.islands.background import Background
from pipeline.islands.exchange import Exchange, Exchanged, Snapshot
from pipeline.islands.ledger import Ledger, Member, compatible
from pipeline.islands.lighthouse import LighthouseMember, Quorum, refuse_other_secret
from pipeline.islands.outer import OuterState
from pipeline.islands.peers import Peers
from pipeline.islands.ranks import LoopRanks, thread_group
from pipeline.islands.report import over_ranks, report_exchange
from pipeline.islands.surroundings import Loader, Surroundings

_AGAIN_S, _TICK_S = 0.5, 1.0


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
        self._ranks, self._background = LoopRanks(around), cast("Background | None", None)
        self._group = thread_group() if around.section.overlap else None

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
        self.ledger = Ledger.from_plain(details).renamed(details["name"], self.name)

    def start(self) -> Stop:
        """Joins the islands that live, or begins with those that are started together. Returns a requested stop.

        Raises:
            ConfigError: the other islands have another secret or another layout.
        """
        section, began, snapshot = self._around.section, time.monotonic(), self._exchange.snapshot()
        while True:
            quorum = self._exchange.ask(self._member(), self._ranks)
            if quorum is None:
                return self._ranks.stop
            refuse_other_secret(quorum, name=self.name)
            members = compatible(quorum.members)
            self._refuse_other_layout(members)
            ready = any(each.living or each.waited for each in members)
            if (ready or len(members) >= section.count) and self._take_part(quorum, snapshot, began):
                return Stop.NO
            self._waited = self._ranks.agreed(time.monotonic() - began > section.start_s)
            time.sleep(_AGAIN_S)

    def due(self, step: int) -> bool:
        """Whether `exchange` is to be called after an inner step: an exchange begins there or ends there."""
        deal = self.ledger.deal
        return deal is not None and self.name in deal.names and step in (deal.snapshot_step, deal.last_step)

    def exchange(self, step: int) -> Stop:
        """Exchanges pseudo-gradients, and takes the state of another island where this one missed an exchange.

        Args:
            step: inner steps done.

        Returns:
            A stop that was requested while it waited; the exchange has not taken place then.
        """
        self.step, deal = step, self.ledger.deal
        if self._background is not None:
            return self._join(Stop.NO)
        if deal is not None and self.name in deal.names and deal.after and step == deal.snapshot_step:
            member, snapshot = self._member(), self._exchange.snapshot()
            self._background = Background(self._exchange, member=member, snapshot=snapshot, group=self._group)
            return Stop.NO
        return self._exchange_now()

    def settle(self, step: int, stop: Stop) -> Stop:
        """Ends an exchange in the background before a checkpoint is written.

        Args:
            step: inner steps done.
            stop: that was requested: other islands are not waited for then.

        Returns:
            The same, or a stop that was requested while it waited.
        """
        if self._background is None:
            return stop
        self.step = step
        return self._join(stop)

    def _exchange_now(self) -> Stop:
        began, snapshot = time.monotonic(), self._exchange.snapshot()
        while True:
            self._around.watchdog.enter_phase("waiting for other islands", self.step)
            quorum = self._exchange.ask(self._member(), self._ranks)
            if quorum is None:
                return self._ranks.stop
            if self._take_part(quorum, snapshot, began):
                return Stop.NO

    def _join(self, stop: Stop) -> Stop:
        background, began = self._background, time.monotonic()
        assert background is not None
        self._around.watchdog.enter_phase("waiting for other islands", self.step)
        if stop:
            background.cancel()
        seconds = 0.0
        while self._ranks.agreed(not background.ended(seconds)):
            self._around.watchdog.report_progress()
            if not stop and self._ranks.stopped():
                stop = self._ranks.stop
                background.cancel()
            seconds = _TICK_S
        self._background, exchanged = None, background.result()
        self._exchange.report_failures(self.step)
        if exchanged is not None:
            waited = time.monotonic() - began
            self._finish(exchanged, since=background.snapshot, waited=waited, overlapped=background.seconds)
        return stop

    def batches(self) -> Iterator[StepBatch]:
        """This rank's batches, of one round after the other; `exchange` must be called where it is `due`."""
        while self.step < self._around.total:
            deal = self.ledger.deal_of(self.name, self.step)
            assert deal is not None
            slots, done = deal.slots(self.name), self.step - deal.step
            if not slots or done >= len(slots):  # this island came in the middle of a round
                if self.exchange(self.step):
                    return
                continue
            first = slots.start + done + 1
            for number, batch in enumerate(self._loader(first, slots.stop)):
                if self.ledger.deal_of(self.name, self.step) != deal:  # it has taken another island's state
                    break
                self.step = deal.step + done + number + 1
                yield replace(batch, step=self.step)

    def close(self) -> None:
        """Leaves: the others do not wait for this island any more."""
        if self._background is not None:
            self._background.cancel()
        self._exchange.close()

    def _member(self) -> Member:
        return Member(self.name, self.ledger, self.step, self._living, self._waited, self._around.layout)

    def _refuse_other_layout(self, members: tuple[Member, ...]) -> None:
        if self.name not in [each.name for each in members]:
            others = ", ".join(each.name for each in members)
            why = f"{others} split the model over their ranks in another way than {self.name}"
            remedy = "the same engine, ZeRO stage, parallel section and number of processes on all islands"
            raise ConfigError("islands", why=why, remedy=remedy)

    def _take_part(self, quorum: Quorum, snapshot: Snapshot, began: float) -> bool:
        """Does what the quorum decides. Returns whether it has succeeded on all ranks of this island."""
        waited, attempted = time.monotonic() - began, time.monotonic()
        self._around.watchdog.enter_phase("exchanging with other islands", self.step)
        exchanged = self._exchange.attempt(quorum, snapshot, self._ranks)
        self._exchange.report_failures(self.step)
        if exchanged is None:
            return False
        self._finish(exchanged, since=None, waited=waited, before_s=time.monotonic() - attempted)
        return True

    def _finish(
        self,
        exchanged: Exchanged,
        *,
        since: Snapshot | None,
        waited: float,
        before_s: float = 0.0,
        overlapped: float | None = None,
    ) -> None:
        """The outer update and where the island stands after it.

        Args:
            exchanged: what the exchange has brought.
            since: see `Exchange.finish`.
            waited: seconds that the training loop has waited for other islands.
            before_s: seconds of the exchange until here, in the training loop.
            overlapped: seconds of the exchange beside inner steps.
        """
        began, decision = time.monotonic(), exchanged.decision
        self._exchange.finish(exchanged, since=since)
        self.ledger, self._living = decision.ledger, True
        if exchanged.heals or (exchanged.mean is not None and not exchanged.contributes):
            self.step = decision.step
        self._exchange.report_failures(self.step)
        sent = int(over_ranks(self._around, self._exchange.bytes_sent))
        costs = {"bytes_sent": sent, "wait_seconds": waited, "seconds": before_s + time.monotonic() - began}
        if overlapped is not None:
            costs["overlapped_seconds"] = overlapped
        report_exchange(self._around, self.step, decision, refused=exchanged.quorum.refused, **costs)
