"""One exchange with the other islands: quorum, mean pseudo-gradient, outer update, the state of a late comer.

Every rank of an island has an `Exchange`; rank r exchanges with the ranks r of the other islands.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.base.errors import TrainingError
from pipeline.checkpoint.shard_table import State, parts_of
from pipeline.checkpoint.store import on_rank_zero
from pipeline.faults.stop import Stop
from pipeline.islands.ledger import Decision, Member, compatible, decide
from pipeline.islands.lighthouse import LighthouseMember, Quorum
from pipeline.islands.mean import Mean, mean_over_islands
from pipeline.islands.outer import OuterState
from pipeline.islands.peers import ExchangeError, Peers, pack, unpack
from pipeline.islands.report import report_failure
from pipeline.islands.surroundings import Surroundings

_TICK_S = 1.0


@dataclass(frozen=True)
class Exchanged:
    """What an attempt that has succeeded on all ranks of the island has brought.

    Attributes:
        decision: what is to be done.
        quorum: that has decided it.
        mean: of the pseudo-gradients; None where a run begins or is resumed.
        own: index of this island in the decision.
        seconds: since the quorum.
    """

    decision: Decision
    quorum: Quorum
    mean: Mean | None
    own: int
    seconds: float

    @property
    def heals(self) -> bool:
        """Whether this island takes the state of another one."""
        return self.own in self.decision.healed


class Exchange:
    """See the module's docstring. Every method is collective over the ranks of the island.

    Args:
        around: the island's rank and run.
        peers: the same ranks of the other islands.
        lighthouse: on rank 0; None on the others.
        outer: the outer state.

    Attributes:
        stop: the stop that was requested while the island waited for others.
    """

    def __init__(
        self, around: Surroundings, *, peers: Peers, lighthouse: LighthouseMember | None, outer: OuterState
    ) -> None:
        self._around, self._peers, self._lighthouse, self._outer = around, peers, lighthouse, outer
        self.stop = Stop.NO

    @property
    def bytes_sent(self) -> int:
        """By this rank to other islands in the last attempt."""
        return self._peers.bytes_sent

    def ask(self, member: Member) -> Quorum | None:
        """The next quorum; None when a stop is requested first.

        Raises:
            TrainingError: the lighthouse failed.
        """
        asked = self._lighthouse.ask(member) if self._lighthouse is not None else None
        while True:
            self._around.watchdog.report_progress()
            quorum = on_rank_zero(lambda: _answer(asked))
            if quorum is not None:
                return quorum
            self.stop = self._around.agreement.requested_stop(self._around.signals)
            if self.stop:
                return None

    def attempt(self, quorum: Quorum, member: Member) -> Exchanged | None:
        """Finds the mean that a quorum decides on; None where that failed on any rank of the island, and is reported.

        Args:
            quorum: the answer.
            member: what this island has asked with.
        """
        around, began = self._around, time.monotonic()
        around.watchdog.enter_phase("exchanging with other islands", member.step)
        members = compatible(quorum.members)
        if around.name not in [each.name for each in members]:
            return None
        decision = decide(members, steps=around.section.steps, total=around.total, quorum=quorum.formed)
        own, mean, failure = decision.names.index(around.name), None, None
        try:
            if decision.contributors or decision.healed:
                attempt, size = f"{quorum.formed}/{around.rank}", len(decision.names)
                store = _store_of(quorum, decision.names[0])
                self._peers.form(store, quorum=quorum.number, attempt=attempt, rank=own, size=size)
            if decision.contributors:
                mean = self._mean(decision)
        except ExchangeError as error:
            failure = str(error)
        if around.agreed(failure is not None):
            report_failure(around, member.step, failure or "on another rank of this island")
            return None
        return Exchanged(decision, quorum, mean, own, time.monotonic() - began)

    def finish(self, exchanged: Exchanged, *, step: int) -> bool:
        """The outer update, and the state of one island for those that take it.

        Args:
            exchanged: what `attempt` has brought.
            step: inner steps that this island has done.

        Returns:
            Whether it has succeeded on all ranks of this island.
        """
        if exchanged.mean is not None and not exchanged.heals:
            self._apply(exchanged.mean)
        decision = exchanged.decision
        if exchanged.own == decision.source and decision.healed:
            self._send_state(decision, step)
        return not exchanged.heals or self._receive_state(decision, step)

    def _mean(self, decision: Decision) -> Mean:
        with self._around.engine.edit_state() as state:
            gradient = self._outer.pseudo_gradient(state)
        compressed = self._around.section.compress == "int8"
        error = self._outer.error if compressed else None
        return mean_over_islands(gradient, self._peers, contributors=decision.contributors, error=error)

    def _apply(self, mean: Mean) -> None:
        self._outer.step(mean.values)
        if mean.error is not None:
            self._outer.error.copy_(mean.error)
        with self._around.engine.edit_state() as state:
            self._outer.write(state)

    def _send_state(self, decision: Decision, step: int) -> None:
        with self._around.engine.edit_state() as state:
            packed = pack([*self._outer.tensors(), *_parts(state)])
        for to in decision.healed:
            try:
                self._peers.send(packed, to=to)
            except ExchangeError as error:  # it tries again with the next exchange
                report_failure(self._around, step, str(error))

    def _receive_state(self, decision: Decision, step: int) -> bool:
        failure = None
        with self._around.engine.edit_state() as state:
            targets = [*self._outer.tensors(), *_parts(state)]
            packed = torch.empty(sum(each.nbytes for each in targets), dtype=torch.uint8)
            try:
                self._peers.receive(packed, source=decision.source)
                unpack(packed, targets)
            except ExchangeError as error:
                failure = str(error)
        self._outer.error.zero_()
        if self._around.agreed(failure is not None):
            report_failure(self._around, step, failure or "on another rank of this island")
            return False
        return True

    def close(self) -> None:
        """Leaves: the others do not wait for this island any more."""
        if self._lighthouse is not None:
            self._lighthouse.close()
        self._peers.close()


def _answer(asked: Future[Quorum] | None) -> Quorum | None:
    assert asked is not None
    try:
        return asked.result(_TICK_S)
    except NotYet:
        return None
    except RuntimeError as error:
        raise TrainingError(f"the lighthouse failed: {error}\n  try: start it again, then this island") from None


def _store_of(quorum: Quorum, name: str) -> str:
    return quorum.stores[[each.name for each in quorum.members].index(name)]


def _parts(state: State) -> list[Tensor]:
    """All tensors of a state, in the order of its keys, which is the same on equal ranks of equal layouts."""
    return [part for value in state.values() for part in parts_of(value).values()]
