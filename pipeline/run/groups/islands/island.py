"""One island of a run: joins the others, takes its samples from the round's deal, and exchanges pseudo-gradients.

An exchange is tried again, without islands that have died, until it succeeds on all ranks of the island. An island that
missed an exchange drops its training since then, and takes the state of an island that took part.

With `islands.overlap` an exchange begins `overlap` inner steps before the round ends, and runs in a thread. Its outer
update is applied at the end of the round, on all ranks after the same step, or before an earlier checkpoint.
"""

from __future__ import annotations

import time
from typing import cast

from foundation.errors import ConfigError, TrainingError
from pipeline.run.groups.islands.background import Background
from pipeline.run.groups.islands.context import IslandContext, Loader
from pipeline.run.groups.islands.exchange import Exchange, Exchanged, Snapshot
from pipeline.run.groups.islands.ledger import Member, compatible
from pipeline.run.groups.islands.lighthouse import LighthouseMember, Quorum, refuse_other_secret
from pipeline.run.groups.islands.local import LocalIsland
from pipeline.run.groups.islands.peers import Peers
from pipeline.run.groups.islands.ranks import thread_group
from pipeline.run.groups.islands.report import over_ranks, report_exchange
from pipeline.runtime.faults.stop_signals import Stop

_AGAIN_S, _TICK_S = 0.5, 1.0


class Island(LocalIsland):
    """An island in synchronous mode. Every method is collective over the ranks of the island.

    Args:
        context: the island's rank and run.
        peers: connections to the same ranks of the other islands.
        lighthouse: connection to the lighthouse on rank 0; None on other ranks.
        loader: makes this rank's batches.
        step: number of inner steps in the engine's state.
    """

    def __init__(
        self,
        context: IslandContext,
        *,
        peers: Peers,
        lighthouse: LighthouseMember[Member] | None,
        loader: Loader,
        step: int,
    ) -> None:
        super().__init__(context, loader=loader, step=step)
        self._living = self._waited = False
        self._exchange = Exchange(context, peers=peers, lighthouse=lighthouse, outer=self._outer)
        self._background = cast("Background | None", None)
        self._group = thread_group() if context.section.overlap else None

    def start(self) -> Stop:
        """Implements `LocalIsland.start`."""
        section, began, snapshot = self._context.section, time.monotonic(), self._exchange.snapshot()
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
            if self._ranks.stopped():
                return self._ranks.stop
            self._waited = self._ranks.agreed(time.monotonic() - began > section.start_s)
            time.sleep(_AGAIN_S)

    def exchange(self, step: int) -> Stop:
        """Implements `LocalIsland.exchange`."""
        self.step, deal = step, self.ledger.deal
        if self._background is not None:
            return self._join(Stop.NO)
        if deal is not None and self.name in deal.names and deal.after and step == deal.snapshot_step:
            member, snapshot = self._member(), self._exchange.snapshot()
            self._background = Background(self._exchange, member=member, snapshot=snapshot, group=self._group)
            return Stop.NO
        return self._exchange_now()

    def settle(self, step: int, stop: Stop) -> Stop:
        """Implements `LocalIsland.settle`."""
        if self._background is None:
            return stop
        self.step = step
        return self._join(stop)

    def _exchange_now(self) -> Stop:
        began, snapshot = time.monotonic(), self._exchange.snapshot()
        while True:
            self._context.watchdog.enter_phase("waiting for other islands", self.step)
            quorum = self._exchange.ask(self._member(), self._ranks)
            if quorum is None:
                return self._ranks.stop
            if self._take_part(quorum, snapshot, began):
                return Stop.NO
            if self._ranks.stopped():
                return self._ranks.stop

    def _join(self, stop: Stop) -> Stop:
        background, began = self._background, time.monotonic()
        assert background is not None
        self._context.watchdog.enter_phase("waiting for other islands", self.step)
        if stop:
            background.cancel()
        seconds = 0.0
        while self._still_runs(background, seconds):
            self._context.watchdog.report_progress()
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

    def _still_runs(self, background: Background, seconds: float) -> bool:
        """Waits for the end of an exchange in the background; returns whether it still runs on any rank.

        Raises:
            TrainingError: the exchange failed on another rank, for which this rank would wait.
        """
        runs = not background.ended(seconds)
        any_runs, failed = self._context.agreement.max_over_ranks(int(runs), int(background.failed))
        if failed:
            background.ended(_TICK_S)  # all ranks raise an error that all have
        if failed and not background.failed:
            raise TrainingError("an exchange with other islands failed on another rank, whose output has the error")
        return bool(any_runs) and not failed

    def close(self) -> None:
        """Implements `LocalIsland.close`."""
        if self._background is not None:
            self._background.cancel()
        self._exchange.close()

    def _member(self) -> Member:
        return Member(self.name, self.ledger, self.step, self._living, self._waited, self._context.layout)

    def _refuse_other_layout(self, members: tuple[Member, ...]) -> None:
        if self.name not in [each.name for each in members]:
            others = ", ".join(each.name for each in members)
            why = f"{others} train another curve than {self.name}, or split the model over their ranks in another way"
            remedy = "the same config, engine, ZeRO stage, parallel section and number of processes on all islands"
            raise ConfigError("islands", why=why, remedy=remedy)

    def _take_part(self, quorum: Quorum[Member], snapshot: Snapshot, began: float) -> bool:
        """Carries out the quorum's decision; returns whether it succeeded on all ranks of this island."""
        waited, attempted = time.monotonic() - began, time.monotonic()
        self._context.watchdog.enter_phase("exchanging with other islands", self.step)
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
        """Makes the outer update, and records the island's position after it.

        Args:
            exchanged: the result of the exchange.
            since: the snapshot; inner steps done after it are kept. None if there were none.
            waited: seconds that the training loop has waited for other islands.
            before_s: seconds of the exchange so far, in the training loop.
            overlapped: seconds of the exchange concurrent with inner steps.
        """
        began, decision = time.monotonic(), exchanged.decision
        self._exchange.finish(exchanged, since=since)
        self.ledger, self._living = decision.ledger, True
        if exchanged.heals or (exchanged.mean is not None and not exchanged.contributes):
            self.step = decision.step
        self._exchange.report_failures(self.step)
        sent = int(over_ranks(self._context, self._exchange.bytes_sent))
        costs = {"bytes_sent": sent, "wait_seconds": waited, "seconds": before_s + time.monotonic() - began}
        if damaged := int(over_ranks(self._context, self._exchange.damaged)):
            costs["damaged_messages"] = damaged
        if overlapped is not None:
            costs["overlapped_seconds"] = overlapped
        report_exchange(self._context, self.step, decision, refused=exchanged.quorum.refused, **costs)
