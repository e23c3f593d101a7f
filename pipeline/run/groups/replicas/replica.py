"""One replica of the model: takes its part of every step's samples, and sums its gradients with the others'.

Every rank of a replica has a `ReplicaOfRun`; rank r exchanges with the ranks r of the other replicas. Between two steps
a quorum divides the next step. After a failed exchange another quorum in the middle of the step divides the samples
that no replica has run, until all samples of the step are in the sum. Then all replicas make the same update.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foundation.directory import Details
from pipeline.checkpoint.format.shard_table import State
from pipeline.config.sections.groups import ReplicasSection
from pipeline.data.loader import StepLoader
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.base import Engine
from pipeline.run.anomalies.guarded_step import GuardedStepper
from pipeline.run.groups.islands.lighthouse import Quorum, refuse_other_secret
from pipeline.run.groups.islands.peers import ExchangeError, Peers
from pipeline.run.groups.replicas.deal import (
    Ranges,
    ReplicaDecision,
    ReplicaMember,
    ahead,
    compatible,
    count_of,
    decide,
    joined,
    left_behind,
    no_exchange,
    other_curve,
)
from pipeline.run.groups.replicas.handover import digest, receive_message, send_message, send_state, take_state
from pipeline.run.groups.replicas.quorums import Quorums
from pipeline.run.groups.replicas.record import ReplicaRecord
from pipeline.run.groups.replicas.sums import GradientSums
from pipeline.runtime.faults.stop_signals import Stop

_AGAIN_S = 0.5
_ATTEMPTS = 6
"""Number of consecutive failures, of exchanges or of forming a process group, after which a replica ends."""
Loader = Callable[[Ranges, tuple[int, int]], StepLoader]
"""Function that loads this rank's batches of given samples, for the steps from a first to a last, counted from 1."""


@dataclass(frozen=True)
class ReplicaContext:
    """The rank and the run of a replica.

    Attributes:
        section: the config's `replicas`, with a name.
        total: number of steps of the run.
        samples: global batch size of all replicas together, in samples.
        rank: rank of this process in the replica.
        engine: executes the steps.
        stepper: stepper with the statistics of loss spikes, which are part of the state.
        load: loads this rank's batches of some samples of the steps.
        quorums: asks for quorums, and agrees with the other ranks of this replica.
        record: records events for the journal and for people.
    """

    section: ReplicasSection
    total: int
    samples: int
    rank: int
    engine: Engine
    stepper: GuardedStepper
    load: Loader
    quorums: Quorums
    record: ReplicaRecord


class ReplicaOfRun:
    """One replica of the model in a run. Every method is collective over the ranks of the replica.

    Args:
        around: the replica's rank and run.
        peers: connections to the same ranks of the other replicas.
        member: the replica's report, from a checkpoint or at the start.
    """

    excluded_from_step_time = False

    def __init__(self, around: ReplicaContext, *, peers: Peers, member: ReplicaMember) -> None:
        self._around, self._peers = around, peers
        self._me = replace(member, state=digest(around.stepper))
        self._part: Ranges = ()
        self._whole, self._continues, self._given = True, False, False
        self._sums = GradientSums()
        self._failures, self._damaged, self._others = 0, 0, ""

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self._me.step

    @property
    def own_share(self) -> float:
        """Share of the last step's samples that this replica ran."""
        return count_of(self._me.held) / self._around.samples

    def state(self) -> State:
        """Returns the engine's state, for an ordinary checkpoint."""
        return self._around.engine.state()

    def details(self) -> Details:
        """Returns the replica's entry in a checkpoint's manifest."""
        exchanges, commit = self._me.exchanges, self._me.commit
        if self._given:  # it has the result of the next step's exchange, not yet in the weights
            exchanges, commit = exchanges - 1, self._me.before or ""
        return {"replicas": {"exchanges": exchanges, "commit": commit}}

    def start(self) -> Stop:
        """Joins the living replicas, or begins with replicas started together. Returns a requested stop.

        Raises:
            ConfigError: the other replicas have another secret, curve or layout, or are at an earlier step than this
                replica's checkpoint.
        """
        section, began, name = self._around.section, time.monotonic(), self._me.name
        while True:
            quorum = self._around.quorums.ask(self._me)
            if quorum is None:
                return self._around.quorums.stop
            refuse_other_secret(quorum, name=name, field="replicas")
            members = compatible(quorum.members)
            if name not in [each.name for each in members]:
                raise other_curve(self._me, members)
            living = any(each.living for each in members)
            if living:  # if they die now, they get time to return
                began = time.monotonic()
            ready = living or any(each.waited for each in members) or len(members) >= section.count
            if not ready:
                waited = self._around.quorums.agreed(time.monotonic() - began > section.start_s)
                self._me = replace(self._me, waited=waited)
                time.sleep(_AGAIN_S)
            elif self._begin(quorum):
                return Stop.NO

    def batches(self) -> Iterator[StepBatch]:
        """Yields this rank's parts of the steps; `exchange` must be called between two parts."""
        loader: Iterator[StepBatch] | None = None
        loaded: Ranges = ()
        while self._me.step < self._around.total:
            step, part = self._me.step + 1, self._part
            if loader is None or part != loaded:
                loader, loaded = iter(self._around.load(part or ((0, 1),), (step, self._around.total))), part
            batch = next(loader)
            self._me = replace(self._me, between=False)
            yield batch if part else replace(batch, micro_batches=[])
            if self._me.step < step:
                self._finished(step)

    def due(self, step: int) -> bool:
        """Tells whether a quorum follows a step: also the last, so no replica leaves before all have its result."""
        return step <= self._around.total

    def exchange(self, step: int) -> Stop:
        """Divides the next step by a quorum; replicas that join late take the state of this or another replica.

        After the last step, too, replicas that join take the state, and have nothing left to do.

        Args:
            step: the last finished step.

        Returns:
            A stop that was requested while it waited.
        """
        self._finished(step)
        while True:
            quorum = self._around.quorums.ask(self._me)
            if quorum is None:
                return self._around.quorums.stop
            if self._begin(quorum):
                return Stop.NO

    def sum_gradients(self, step: StepBatch, gradients: Sequence[Tensor], sums: Tensor) -> Sequence[MicroBatch]:
        """Implements `engines.base.GradientExchange`.

        Raises:
            LostError: this replica is left behind, or its numbers differ from the others'.
        """
        ready = self._continues or self._whole
        if not self._continues:  # the step's own micro-batches, perhaps repeated
            self._me = replace(self._me, held=self._part)
        self._continues = False
        while not self._given:
            if ready and self._me.group and self._exchanged(gradients, sums):
                break
            quorum = self._around.quorums.ask(self._me, until_stop=False)
            assert quorum is not None
            ready, more = self._go_on(quorum, step.step, gradients, sums)
            if more:
                return more
        self._given = False
        self._sums.write(gradients, sums)
        self._around.quorums.enter_phase("training", step.step)
        return ()

    def settle(self, step: int, stop: Stop) -> Stop:  # noqa: ARG002
        """Returns the requested stop; nothing runs in the background, so there is nothing to wait for."""
        return stop

    def leave(self) -> None:
        """Leaves: the other replicas no longer wait for this one."""
        self.close()

    def close(self) -> None:
        """Leaves, and closes the connections; it may be called twice."""
        self._around.quorums.close()
        self._peers.close()

    def _finished(self, step: int) -> None:
        self._me = replace(self._me, step=step, held=(), between=True, state=digest(self._around.stepper))

    def _decide(self, quorum: Quorum[ReplicaMember]) -> ReplicaDecision | None:
        """Decides this replica's next action in a quorum; None if it has to ask again.

        Raises:
            LostError: this replica is left behind, or its numbers differ from the others'.
            ConfigError: its checkpoint is later than the others' step.
        """
        members, name = compatible(quorum.members), self._me.name
        mine = next((each for each in members if each.name == name), None)
        if mine is None:
            return None
        # without `state`, which is rank 0's: all ranks decide alike
        if replace(mine, state=self._me.state) != self._me:
            self._failed(
                f"another report of {name} than its own is at the lighthouse: an old one, or of a second process"
            )
            return None
        decision = decide(members, samples=self._around.samples, quorum=quorum.formed)
        if name in (*decision.behind, *decision.ahead):
            source = next(each for each in members if each.name == decision.source)
            raise (left_behind if name in decision.behind else ahead)(self._me, source)
        if name in decision.waiting:
            return None
        if decision.late:
            self._give_result(decision, quorum)
            return None
        return decision

    def _begin(self, quorum: Quorum[ReplicaMember]) -> bool:
        """Carries out a quorum's decision between two steps; returns whether this replica takes part in the next."""
        decision = self._decide(quorum)
        if decision is None:
            self._part = ()
            return self._given
        formed = self._form(decision, quorum, decision.names)
        name = self._me.name
        if name in decision.healed and not (formed and self._take_state(decision)):
            return False
        if decision.healed and formed and name == decision.source:
            self._send_state(decision)
        self._part, self._whole = decision.parts.get(name, ()), True
        self._me = replace(self._me, living=True)
        if self._me.step < self._around.total:
            self._around.record.began(self._me, decision)
        return True

    def _go_on(
        self, quorum: Quorum[ReplicaMember], step: int, gradients: Sequence[Tensor], sums: Tensor
    ) -> tuple[bool, Sequence[MicroBatch]]:
        """Carries out a quorum's decision in the middle of a step.

        Returns:
            Whether the next exchange can succeed, and micro-batches to run before it.
        """
        self._whole = False
        decision = self._decide(quorum)
        if decision is None:
            return False, ()
        name = self._me.name
        if name in decision.reset:
            for each in (*gradients, sums):
                each.zero_()
            self._me = replace(self._me, held=())
        if not self._form(decision, quorum, decision.names):
            return False, ()
        self._around.record.went_on(self._me, decision)
        part = decision.parts.get(name, ())
        if not part:
            return True, ()
        self._me, self._continues = replace(self._me, held=joined(self._me.held + part)), True
        return True, self._around.load(part, (step, step)).gather(step).micro_batches

    def _exchanged(self, gradients: Sequence[Tensor], sums: Tensor) -> bool:
        """Sums the gradients; returns whether that succeeded on all ranks of this replica."""
        failure = None
        try:
            self._sums.exchange(gradients, sums, self._peers)
        except ExchangeError as error:
            failure = str(error)
        if self._failed(failure):
            return False
        self._sums.keep()
        commit = hashlib.sha256(f"{self._me.commit} {self._me.group} {self._me.exchanges}".encode()).hexdigest()[:16]
        self._committed(commit)
        return True

    def _committed(self, commit: str) -> None:
        me = self._me
        self._me = replace(me, exchanges=me.exchanges + 1, commit=commit, before=me.commit)
        self._failures = 0

    def _failed(self, failure: str | None) -> bool:
        """Tells whether anything failed on any rank of this replica; if so, gives up the process group.

        Raises:
            LostError: this is the `_ATTEMPTS`th failure since the last exchange.
        """
        failed, damaged = self._around.quorums.failed_and_damaged(failure is not None, self._peers.damaged)
        if damaged > self._damaged:
            self._around.record.damaged(self._me, damaged - self._damaged)
        self._damaged = damaged
        if not failed:
            return False
        self._me = replace(self._me, group="")
        self._peers.close()  # peers that still wait for this replica in the group fail at once
        failure = failure or "on another rank of this replica"
        self._around.record.failed(self._me, failure)
        self._failures += 1
        if self._failures == _ATTEMPTS:
            raise no_exchange(self._me, failure, attempts=_ATTEMPTS, others=self._others)
        return True

    def _form(self, decision: ReplicaDecision, quorum: Quorum[ReplicaMember], names: Sequence[str]) -> bool:
        """Forms the process group of a decision; returns whether this replica has the group."""
        if decision.formed:
            return True
        failure, others = None, [each for each in names if each != self._me.name]
        self._others = ", ".join(f"{each} at {quorum.store_of(each)}" for each in others)
        try:
            self._peers.form(
                quorum.store_of(names[0]),
                quorum=quorum.number,
                attempt=f"{quorum.formed}/{self._around.rank}",
                rank=names.index(self._me.name),
                size=len(names),
            )
        except ExchangeError as error:
            failure = str(error)
        if self._failed(failure):
            return False
        self._me = replace(self._me, group=decision.group)
        return True

    def _send_state(self, decision: ReplicaDecision) -> None:
        to, failure = [decision.names.index(each) for each in decision.healed], None
        try:
            send_state(self._peers, self._me, self._around.engine, self._around.stepper, to=to)
        except ExchangeError as error:  # tries again at the next step; this step's exchange will fail
            failure = str(error)
        self._failed(failure)

    def _take_state(self, decision: ReplicaDecision) -> bool:
        """Takes the state of another replica; returns whether all ranks of this replica have it."""
        header, packed, failure = dict[str, Any](), torch.empty(0), None
        try:
            header, packed = receive_message(self._peers, source=decision.names.index(decision.source))
        except ExchangeError as error:
            failure = str(error)
        if self._failed(failure):  # changes nothing before all ranks have their part
            return False
        self._me = take_state(header, packed, self._me, self._around.engine, self._around.stepper)
        return True

    def _give_result(self, decision: ReplicaDecision, quorum: Quorum[ReplicaMember]) -> None:
        """Sends the last exchange's result to replicas that missed it; the others ask again meanwhile."""
        names, name = (decision.source, *decision.late), self._me.name
        self._me = replace(self._me, group="")
        if name not in names or not self._form(decision, quorum, names):
            return
        failure, commit = None, ""
        try:
            if name == decision.source:
                to = list(range(1, len(names)))
                tensors = self._sums.tensors()
                header: dict[str, Any] = {"commit": self._me.commit, "loss_bytes": tensors[1].nbytes}
                send_message(self._peers, header, tensors, to=to)
            else:
                header, packed = receive_message(self._peers, source=0)
                commit = header["commit"]
                result, loss_sums = packed.split([packed.numel() - header["loss_bytes"], header["loss_bytes"]])
                self._sums.take(result.clone().view(torch.float32), loss_sums.clone().view(torch.float64))
        except ExchangeError as error:
            failure = str(error)
        failed = self._failed(failure)
        self._me = replace(self._me, group="")  # this group's members differ from the next exchange's
        if not failed and name in decision.late:
            self._committed(commit)
            self._given = True
