"""One island of a run: joins the others, takes its samples from the round's deal, and exchanges pseudo-gradients.

Every rank of an island has one; rank r exchanges with the ranks r of the other islands. An exchange is tried again,
without those that have died, until it succeeds on all ranks of the island. What an island that missed an exchange has
trained meanwhile is dropped: it takes the state of one that did not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.base.errors import ConfigError, TrainingError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.shard_table import State, parts_of
from pipeline.checkpoint.store import on_rank_zero
from pipeline.config.islands_schema import IslandsSection
from pipeline.data.loader import StepBatch, StepLoader
from pipeline.engines.base import Engine
from pipeline.faults.agreement import Agreement
from pipeline.faults.stop import Stop, StopSignals
from pipeline.faults.watchdog import Watchdog
from pipeline.islands.ledger import Decision, Ledger, Member, compatible, decide
from pipeline.islands.lighthouse import LighthouseMember, Quorum, refuse_other_secret
from pipeline.islands.mean import Mean, mean_over_islands
from pipeline.islands.outer import OuterState
from pipeline.islands.peers import ExchangeError, Peers, pack, unpack

_TICK_S, _AGAIN_S = 1.0, 0.5
Record = Callable[..., None]
"""Takes a step and the values of an event of the journal."""
Loader = Callable[[int, int], StepLoader]
"""The batches of the data steps from a first to a last one, counted from 1."""


@dataclass(frozen=True)
class Surroundings:
    """What an island has of its rank and its run.

    Attributes:
        section: the config's `islands`; with a name.
        total: inner steps of the run.
        samples: global batch of one island.
        layout: see `Member.layout`.
        rank: of this process in the island.
        engine: executes the inner steps.
        agreement: over the ranks of the island.
        signals: stop signals of this process.
        watchdog: of this process.
        record: see `Record`; ignored on all ranks but rank 0.
        say: prints a line on rank 0.
    """

    section: IslandsSection
    total: int
    samples: int
    layout: str
    rank: int
    engine: Engine
    agreement: Agreement
    signals: StopSignals
    watchdog: Watchdog
    record: Record
    say: Callable[[str], None]


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
        stop: the stop that was requested while the island waited for others.
    """

    excluded_from_step_time = True
    own_share = 1.0

    def __init__(
        self,
        around: Surroundings,
        *,
        peers: Peers,
        lighthouse: LighthouseMember[Member] | None,
        loader: Loader,
        step: int,
    ) -> None:
        self._around, self._peers, self._lighthouse, self._loader = around, peers, lighthouse, loader
        self._living, self._waited, self.stop = False, False, Stop.NO
        self.step, self.ledger = step, Ledger()
        with around.engine.edit_state() as state:
            self._outer = OuterState(state, around.section.outer)

    @property
    def name(self) -> str:
        """Of this island."""
        assert self._around.section.name is not None
        return self._around.section.name

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
        return {"island": {"name": self.name, **self.ledger.plain()}}

    def load(self, directory: Path, details: dict[str, Any] | None) -> None:
        """Loads the outer state of a checkpoint; of an ordinary run's, the outer optimizer begins afresh.

        Args:
            directory: of the checkpoint.
            details: the manifest's `island`; None of an ordinary run.
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
            quorum = self._ask()
            if quorum is None:
                return self.stop
            refuse_other_secret(quorum, name=self.name)
            members = compatible(quorum.members)
            if self.name not in [each.name for each in members]:
                others = ", ".join(each.name for each in members)
                why = f"{others} split the model over their ranks in another way than {self.name}"
                remedy = "the same engine, ZeRO stage, parallel section and number of processes on all islands"
                raise ConfigError("islands", why=why, remedy=remedy)
            ready = any(each.living or each.waited for each in members)
            if (ready or len(members) >= section.count) and self._take_part(quorum, began):
                return Stop.NO
            self._waited = self._agreed(time.monotonic() - began > section.start_s)
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
            quorum = self._ask()
            if quorum is None:
                return self.stop
            if self._take_part(quorum, began):
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

    def leave(self) -> None:
        """Does nothing: the others wait, so that islands that are stopped together go on with their round together."""

    def close(self) -> None:
        """Leaves: the others do not wait for this island any more."""
        if self._lighthouse is not None:
            self._lighthouse.close()
        self._peers.close()

    def _member(self) -> Member:
        return Member(self.name, self.ledger, self.step, self._living, self._waited, self._around.layout)

    def _ask(self) -> Quorum[Member] | None:
        """The next quorum; None when a stop is requested first."""
        asked: Future[Quorum[Member]] | None = None
        if self._lighthouse is not None:
            asked = self._lighthouse.ask(self._member())

        def answer() -> Quorum[Member] | None:
            assert asked is not None
            try:
                return asked.result(_TICK_S)
            except NotYet:
                return None
            except RuntimeError as error:
                raise TrainingError(
                    f"the lighthouse failed: {error}\n  try: start it again, then this island"
                ) from None

        while True:
            self._around.watchdog.report_progress()
            quorum = on_rank_zero(answer)
            if quorum is not None:
                return quorum
            self.stop = self._around.agreement.requested_stop(self._around.signals)
            if self.stop:
                return None

    def _take_part(self, quorum: Quorum[Member], began: float) -> bool:
        """Does what the quorum decides. Returns whether it has succeeded on all ranks of this island."""
        around, waited = self._around, time.monotonic() - began
        around.watchdog.enter_phase("exchanging with other islands", self.step)
        members = compatible(quorum.members)
        if self.name not in [each.name for each in members]:
            return False
        section = around.section
        decision = decide(members, steps=section.steps, total=around.total, quorum=quorum.formed)
        own, before, exchanged = decision.names.index(self.name), self.ledger, time.monotonic()
        try:
            if decision.contributors or decision.healed:
                attempt = f"{quorum.formed}/{around.rank}"
                size, store = len(decision.names), _store_of(quorum, decision.names[0])
                self._peers.form(store, quorum=quorum.number, attempt=attempt, rank=own, size=size)
            mean = self._mean(decision) if decision.contributors else None
            failure = None
        except ExchangeError as error:
            mean, failure = None, str(error)
        if self._agreed(failure is not None):
            self._report_failure(failure or "on another rank of this island")
            return False
        if mean is not None and own not in decision.healed:
            self._apply(mean)
        if decision.healed and not self._heal(decision, own):
            return False
        self.ledger, self._living = decision.ledger, True
        if own in decision.healed or mean is not None:
            self.step = decision.step
        self._report(decision, quorum, before=before, waited=waited, seconds=time.monotonic() - exchanged)
        return True

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

    def _heal(self, decision: Decision, own: int) -> bool:
        """Sends this island's state to those that take it, or takes it. Returns whether this island has it."""
        if own == decision.source:
            with self._around.engine.edit_state() as state:
                packed = pack([*self._outer.tensors(), *_parts(state)])
            for to in decision.healed:
                try:
                    self._peers.send(packed, to=to)
                except ExchangeError as error:  # it tries again with the next exchange
                    self._report_failure(str(error))
            return True
        if own not in decision.healed:
            return True
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
        if self._agreed(failure is not None):
            self._report_failure(failure or "on another rank of this island")
            return False
        return True

    def _agreed(self, failed: bool) -> bool:
        """Whether it is so on any rank of the island."""
        return bool(self._around.agreement.max_over_ranks(int(failed))[0])

    def _report_failure(self, why: str) -> None:
        self._around.record(self.step, event="exchange_failed", why=why)
        self._around.say(f"step {self.step}: exchange with the other islands failed: {why}")

    def _report(
        self, decision: Decision, quorum: Quorum[Member], *, before: Ledger, waited: float, seconds: float
    ) -> None:
        around, deal = self._around, decision.ledger.deal
        assert deal is not None
        sent = torch.tensor(float(self._peers.bytes_sent), dtype=torch.float64, device=around.agreement.device)
        if dist.is_initialized():
            dist.all_reduce(sent)
        names = decision.names
        lost = {name: self._samples(slots) for name, slots in decision.lost.items() if slots}
        trained = {names[n]: self._samples(before.deal.slots(names[n])) for n in decision.contributors if before.deal}
        healed = [names[n] for n in decision.healed]
        values = {
            "round": decision.ledger.round,
            "islands": list(names),
            "trained": trained if self.name not in healed else {},
            "lost": lost,
            "healed": healed,
            "refused": list(quorum.refused),
            "next_samples": self._samples(deal.slots(self.name)),
            "samples_dealt": decision.ledger.slots * around.samples,
            "bytes_sent": int(sent),
            "wait_seconds": waited,
            "seconds": seconds,
        }
        around.record(self.step, event="exchange" if decision.contributors else "joined", **values)
        for name, (first, last) in lost.items():
            around.say(f"step {self.step}: lost: samples {first} to {last} of island {name}, which did not contribute")
        if self.name in healed:
            source = names[decision.source]
            around.say(f"step {self.step}: joined {', '.join(names)} with the state of island {source}")

    def _samples(self, slots: range) -> list[int]:
        """The first and the last sample of slots; empty for none."""
        samples = self._around.samples
        return [slots.start * samples, slots.stop * samples - 1] if slots else []


def _store_of(quorum: Quorum[Member], name: str) -> str:
    return quorum.stores[[each.name for each in quorum.members].index(name)]


def _parts(state: State) -> list[Tensor]:
    """All tensors of a state, in the order of its keys, which is the same on equal ranks of equal layouts."""
    return [part for value in state.values() for part in parts_of(value).values()]
