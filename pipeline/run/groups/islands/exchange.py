"""One exchange with the other islands: quorum, mean pseudo-gradient, outer update, state for islands that join late.

Every rank of an island has an `Exchange`; rank r exchanges with the ranks r of the other islands. `attempt` reads no
state of the engine, so it may run concurrently with inner steps (`background`); `finish` changes the weights.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.checkpoint.format.shard_table import all_parts
from pipeline.run.groups.islands.context import IslandContext
from pipeline.run.groups.islands.ledger import Deal, Decision, Member, compatible, decide
from pipeline.run.groups.islands.lighthouse import LighthouseMember, Quorum, answer_of
from pipeline.run.groups.islands.mean import Mean, mean_over_islands
from pipeline.run.groups.islands.outer import OuterState, gather, learning_rate_ratio
from pipeline.run.groups.islands.peers import ExchangeError, Peers, pack, unpack
from pipeline.run.groups.islands.ranks import Ranks
from pipeline.run.groups.islands.report import report_failure

_TICK_S = 1.0
_NOT_YET, _NOW = (torch.tensor([value], dtype=torch.uint8) for value in (0, 1))


@dataclass(frozen=True)
class Snapshot:
    """The inner weights from which an exchange computes the pseudo-gradient.

    Attributes:
        weights: fp32 [N], a copy.
        state_bytes: bytes of the outer weights and momentum, and of the engine's state including weights, on this rank.
    """

    weights: Tensor
    state_bytes: int


@dataclass(frozen=True)
class Exchanged:
    """Result of an attempt that has succeeded on all ranks of the island.

    Attributes:
        decision: the decision that the attempt carried out.
        quorum: the quorum that made the decision.
        own: index of this island in the decision.
        mean: mean of the pseudo-gradients; None where a run begins or is resumed.
        received: packed state of another island, uint8 [n]; None if this island keeps its own.
    """

    decision: Decision
    quorum: Quorum[Member]
    own: int
    mean: Mean | None
    received: Tensor | None

    @property
    def heals(self) -> bool:
        """Whether this island takes another island's state."""
        return self.own in self.decision.healed

    @property
    def contributes(self) -> bool:
        """Whether the mean includes this island's pseudo-gradient."""
        return self.own in self.decision.contributors


class Exchange:
    """One rank's exchanges with other islands. Every method is collective over the ranks of the island.

    Args:
        context: the island's rank and run.
        peers: connections to the same ranks of the other islands.
        lighthouse: connection to the lighthouse on rank 0; None on other ranks.
        outer: the outer state.

    Attributes:
        failures: unreported reasons of failed attempts; a thread leaves the report to the training loop.
    """

    def __init__(
        self, context: IslandContext, *, peers: Peers, lighthouse: LighthouseMember[Member] | None, outer: OuterState
    ) -> None:
        self._context, self._peers, self._lighthouse, self._outer = context, peers, lighthouse, outer
        self.failures: list[str] = []
        self._group, self._group_used = "", 0  # fields of the next `Member`

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to other islands in the last attempt."""
        return self._peers.bytes_sent

    @property
    def damaged(self) -> int:
        """Number of messages of the last attempt that arrived damaged at this rank and were requested again."""
        return self._peers.damaged

    def snapshot(self) -> Snapshot:
        """Copies the engine's weights, which may change afterwards."""
        with self._context.engine.edit_state() as state:
            size = sum(each.nbytes for each in (*self._outer.tensors(), *all_parts(state)))
            return Snapshot(gather(state), size)

    def ask(self, member: Member, ranks: Ranks) -> Quorum[Member] | None:
        """Asks for the next quorum; None if the exchange is given up first.

        Raises:
            TrainingError: the lighthouse failed.
        """
        member = replace(member, group=self._group, group_used=self._group_used)
        asked = self._lighthouse.ask(member) if self._lighthouse is not None else None
        while True:
            quorum = ranks.from_first(lambda: answer_of(asked, group="island"))
            if quorum is not None or ranks.stopped():
                return quorum

    def attempt(self, quorum: Quorum[Member], snapshot: Snapshot, ranks: Ranks) -> Exchanged | None:
        """Carries out the part of a quorum's decision that reads no state of the engine.

        Args:
            quorum: the lighthouse's answer.
            snapshot: copy of the island's inner weights.
            ranks: the ranks of the island, in the training loop or in a thread.

        Returns:
            The result; None where the attempt failed on any rank of the island (see `failures`).
        """
        section, name = self._context.section, self._context.name
        members = compatible(quorum.members)
        if name not in [each.name for each in members]:
            return None
        decision = decide(
            members, steps=section.steps, total=self._context.total, quorum=quorum.formed, overlap=section.overlap
        )
        own, mean, received, failure, began = decision.names.index(name), None, None, None, time.monotonic_ns()
        group, connects = self._group, bool(decision.contributors or decision.healed)
        self._peers.bytes_sent, self._peers.damaged, self._group = 0, 0, ""
        try:
            if connects:
                self._form(quorum, decision, own)
            if decision.contributors:
                mean = self._mean(decision, snapshot)
            if own in decision.healed:
                received = self._receive_state(decision.source, snapshot.state_bytes, ranks)
        except ExchangeError as error:
            failure = str(error)
        if ranks.agreed(failure is not None):
            self.failures.append(failure or "on another rank of this island")
            self._peers.close()  # peers that still wait for this island in the group fail at once
            return None
        if not connects:
            self._group = group
        elif not decision.healed:  # otherwise a state is still under way, and not all know whether it arrives
            self._group, self._group_used = decision.group, quorum.formed + time.monotonic_ns() - began
        return Exchanged(decision, quorum, own, mean, received)

    def keep_waiting(self, exchanged: Exchanged, wanted: threading.Event) -> None:
        """Tells islands that await this island's state to wait on until the training loop can send it."""
        if exchanged.own != exchanged.decision.source:
            return
        tick = min(_TICK_S, self._context.section.timeout_s / 4)
        while exchanged.decision.healed and not wanted.wait(tick):
            for to in exchanged.decision.healed:
                with suppress(ExchangeError):  # `finish` will find and report it
                    self._peers.send(_NOT_YET, to=to)

    def finish(self, exchanged: Exchanged, *, since: Snapshot | None) -> None:
        """Makes the outer update, and sends this island's state to joining islands; or takes another island's.

        Args:
            exchanged: the result of `attempt`.
            since: the snapshot; inner steps done after it are kept. None if there were none.
        """
        if exchanged.received is not None:
            self._take_state(exchanged.received)
            return
        if exchanged.mean is not None:
            ended = exchanged.decision.ended
            assert ended is not None
            self._apply(exchanged.mean, ended, since if exchanged.contributes else None)
        if exchanged.own == exchanged.decision.source and exchanged.decision.healed:
            self._send_state(exchanged.decision)

    def report_failures(self, step: int) -> None:
        """Writes the failures of attempts to the journal. Called in the training loop."""
        for why in self.failures:
            report_failure(self._context, step, why)
        self.failures.clear()

    def close(self) -> None:
        """Leaves: the other islands no longer wait for this one."""
        if self._lighthouse is not None:
            self._lighthouse.close()
        self._peers.close()

    def _form(self, quorum: Quorum[Member], decision: Decision, own: int) -> None:
        if decision.formed:
            return
        attempt, size = f"{quorum.formed}/{self._context.rank}", len(decision.names)
        store = quorum.store_of(decision.names[0])
        self._peers.form(store, quorum=quorum.number, attempt=attempt, rank=own, size=size)

    def _mean(self, decision: Decision, snapshot: Snapshot) -> Mean:
        gradient = self._outer.pseudo_gradient(snapshot.weights)
        compressed = self._context.section.compress == "int8"
        error = self._outer.error if compressed else None
        return mean_over_islands(gradient, self._peers, contributors=decision.contributors, error=error)

    def _apply(self, mean: Mean, ended: Deal, since: Snapshot | None) -> None:
        section, kept = self._context.section, 1.0
        if section.outer.momentum_follows_lr:
            kept = learning_rate_ratio(self._context.schedule, ended, steps=section.steps, overlap=section.overlap)
        self._outer.step(mean.values, kept=kept)
        if mean.error is not None:
            self._outer.error.copy_(mean.error)
        with self._context.engine.edit_state() as state:
            self._outer.write(state, since=None if since is None else since.weights)

    def _send_state(self, decision: Decision) -> None:
        with self._context.engine.edit_state() as state:
            packed = pack([*self._outer.tensors(), *all_parts(state)])
        for to in decision.healed:
            try:
                self._peers.send(_NOW, to=to)
                self._peers.send(packed, to=to)
            except ExchangeError as error:  # the joining island tries again with the next exchange
                self.failures.append(str(error))

    def _receive_state(self, source: int, size: int, ranks: Ranks) -> Tensor:
        packed, here = torch.empty(size, dtype=torch.uint8), torch.zeros_like(_NOT_YET)
        while not here:
            if ranks.asked():  # the source may still have to train a long tail
                raise ExchangeError("given up: this island was asked to stop")
            self._peers.receive(here, source=source)
        self._peers.receive(packed, source=source)
        return packed

    def _take_state(self, packed: Tensor) -> None:
        with self._context.engine.edit_state() as state:
            unpack(packed, [*self._outer.tensors(), *all_parts(state)])
            # only the other island contributes what it has trained since its pseudo-gradient was taken
            self._outer.write(state)
        self._outer.error.zero_()
