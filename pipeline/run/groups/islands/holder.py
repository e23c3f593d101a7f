"""The holder of the outer state in asynchronous mode: applies each island's pseudo-gradient when it comes. No network.

One process, the lighthouse's, has the outer weights and deals the samples. An island that has finished its round sends
its pseudo-gradient, gets the newest weights and the next slots, and waits for no other island. The holder keeps nothing
on disk. After a restart it takes the newest outer state of any island, and the rounds that were open.

The outer update is a delayed Nesterov update (Liu et al. 2024, arXiv:2401.09135, with c = 0), with weight 1 / (1 + s)
for a pseudo-gradient instead of the paper's 1 / N. The staleness s is the number of outer updates since the island got
its weights (a learning rate divided by the staleness: Zhang et al. 2016, arXiv:1511.05950, whose staleness begins at
1). N islands of equal speed have s = N - 1, which gives the paper's factor. With N living islands:

    weights -= lr * g / (1 + s);  buffer += g / (1 + s)
    every N updates:  momentum = mu * momentum + buffer;  weights -= lr * mu * momentum;  buffer = 0

With a single island this is the Nesterov step of `outer.OuterState`.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.config.sections.groups import IslandsSection
from pipeline.run.groups.islands.ledger import Deal, Ledger, Tail

SILENT_S = 5.0
"""Seconds without a message after which an island is dead, as in torchft's lighthouse."""


class OuterShard(NamedTuple):
    """The outer state of one rank of all islands: fp32 [N] each. Never changed in place, since islands receive it."""

    weights: Tensor
    momentum: Tensor


@dataclass
class _LivingIsland:
    """A living island, as the holder knows it.

    Attributes:
        session: identifier of the island's process.
        ranks: number of its ranks.
        ledger: the island's ledger when it joined.
        seen: time of its last message, in seconds of the holder's clock.
        deal: open round of the island; None without one.
        version: number of outer updates in the weights with which it trains.
        pushed: rank -> pseudo-gradient, not yet applied.
        given: rank -> outer state that the rank is to take.
        told: number of the holder's entries of lost slots that the island knows.
        telling: the value of `told` once the island has received the last answer.
        committed: first slot, staleness and weight of its newest pseudo-gradient.
    """

    session: str
    ranks: int
    ledger: Ledger
    seen: float
    deal: Deal | None = None
    version: int = 0
    pushed: dict[int, Tensor] = field(default_factory=dict)
    given: dict[int, OuterShard] = field(default_factory=dict)
    told: int = 0
    telling: int = 0
    committed: dict[str, float] = field(default_factory=dict)


class Holder:
    """The holder of the outer state. Its methods may be called from many threads.

    Args:
        section: the config's `islands`.
        clock: returns the time in seconds.

    Attributes:
        version: number of outer updates so far.
    """

    def __init__(self, section: IslandsSection, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._section, self._total, self._clock = section, 0, clock
        self._lock, self._places, self._layout = threading.RLock(), dict[str, _LivingIsland](), ""
        self._forget()

    def _forget(self) -> None:
        """Begins anew without an outer state."""
        self._began: float | None = None
        self._source, self._ready, self._lineage = "", False, ""
        self._shards, self._buffers = dict[int, OuterShard](), dict[int, Tensor]()
        self.version, self._slots, self._since, self._lost, self._told = 0, 0, 0, list[Tail](), 0

    def join(
        self, name: str, session: str, *, layout: str, ranks: int, total: int, ledger: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Tells an island that began or reconnected its next action; after `wait` and `upload` it asks again.

        Args:
            session: identifier of the island's process.
            layout: digest of the keys that determine its loss curve, and of its shards on all ranks (see
                `ledger.Member`).
            ranks: number of the island's ranks.
            total: number of slots of the run: steps of all islands together.
            ledger: the island's ledger, as JSON.

        Returns:
            `state`: wait; upload (its outer state to the holder); keep (go on with its round); take (the newest state
            and a round); end (the newest state, the run is over); refused.
        """
        with self._lock:
            self._place(name, session)  # it counts as alive even if a long update has delayed its message
            self._drop_silent()
            if self._places and layout != self._layout:
                return {"state": "refused", "islands": sorted(self._places)}
            if layout != self._layout:  # the state is another run's, which has no living island
                self._forget()
            place = self._places.get(name)
            if place is not None and place.session != session:
                self._drop(name)
                place = None
            self._layout, self._total, now = layout, total, self._clock()
            self._began = now if self._began is None else self._began
            if place is None:
                place = self._places[name] = _LivingIsland(session, ranks, Ledger.from_plain(dict(ledger)), now)
                place.told = place.telling = self._told
            place.seen, place.ledger = now, Ledger.from_plain(dict(ledger))
            if not self._ready:
                return self._await_state(name, now)
            if place.deal is not None and place.deal == place.ledger.deal and self._lineage == place.ledger.commit:
                self._confirm_receipt(place)
                return {"state": "keep"}
            return self._next(name, place)

    def upload(self, name: str, session: str, rank: int, shard: OuterShard) -> dict[str, Any]:
        """Takes the outer state of one rank of the island with the newest state."""
        with self._lock:
            place = self._place(name, session)
            if place is None or self._ready or name != self._source:
                return {"state": "rejoin"}
            self._shards[rank] = shard
            self._buffers[rank] = torch.zeros_like(shard.weights)
            if len(self._shards) == place.ranks:
                self._begin(place.ledger)
            return {"state": "taken"}

    def push(self, name: str, session: str, rank: int, gradient: Tensor) -> dict[str, Any]:
        """Takes the pseudo-gradient of one rank, fp32 [N]; `commit` applies all ranks' pseudo-gradients."""
        with self._lock:
            place = self._place(name, session)
            if place is None or place.deal is None:
                return {"state": "rejoin"}
            place.pushed[rank] = gradient
            return {"state": "taken"}

    def commit(self, name: str, session: str, first: int) -> dict[str, Any]:
        """Applies the pseudo-gradients that an island pushed for the round from slot `first`, and deals the next round.

        Returns:
            As `join`; rejoin if the island's round is no longer open.
        """
        with self._lock:
            place = self._place(name, session)
            self._drop_silent()
            if place is None or place.deal is None or place.deal.first != first or len(place.pushed) != place.ranks:
                return {"state": "rejoin"}
            staleness = self.version - place.version
            began = self._clock()
            self._update(place.pushed, 1 / (1 + staleness))
            for each in self._places.values():  # messages that arrive meanwhile wait for the lock
                each.seen += self._clock() - began
            place.committed = {"first": first, "staleness": staleness, "weight": 1 / (1 + staleness)}
            place.pushed, place.deal = {}, None
            self._confirm_receipt(place)
            return self._next(name, place)

    def pull(self, name: str, session: str, rank: int) -> OuterShard | None:
        """Returns the outer state for a rank, as of the last answer to its island; None for another session."""
        with self._lock:
            place = self._place(name, session)
            return place.given.get(rank) if place is not None else None

    def beat(self, name: str, session: str) -> None:
        """Notes that the island lives."""
        with self._lock:
            self._place(name, session)
            self._drop_silent()

    def leave(self, name: str, session: str) -> None:
        """Removes an island that has ended; its open round is lost."""
        with self._lock:
            if self._place(name, session) is not None:
                self._drop(name)

    def _place(self, name: str, session: str) -> _LivingIsland | None:
        place = self._places.get(name)
        if place is None or place.session != session:
            return None
        place.seen = self._clock()
        return place

    def _await_state(self, name: str, now: float) -> dict[str, Any]:
        """Waits for the islands at the start, and chooses the island whose outer state is taken."""
        assert self._began is not None
        if self._source not in self._places:
            if len(self._places) < self._section.count and now - self._began < self._section.start_s:
                return {"state": "wait"}
            self._source = max(self._places, key=lambda each: (_rank(self._places[each].ledger), each))
            self._shards, self._buffers = {}, {}
        return {"state": "upload" if name == self._source else "wait"}

    def _begin(self, ledger: Ledger) -> None:
        """Continues from the source's ledger: open rounds of living islands stay open."""
        self._ready, self.version = True, ledger.round
        self._lineage = ledger.commit or uuid.uuid4().hex[:16]
        open_then = {(each.first, each.end): each for each in ledger.tails}
        if ledger.deal is not None and ledger.deal.steps:
            for name in ledger.deal.names:  # a run that was synchronous has several, and `before` with tails
                slots = ledger.deal.slots(name)
                open_then[slots.start, slots.stop] = Tail(name, slots.start, slots.stop)
        self._slots = ledger.slots
        for name, place in self._places.items():
            own = place.ledger.deal
            if own is None or not own.steps or place.ledger.commit != self._lineage:
                continue
            if own.names != (name,) or own.step != own.first:  # the round was dealt in synchronous mode
                continue
            if (own.first, own.end) in open_then or own.first >= ledger.slots:
                open_then.pop((own.first, own.end), None)
                place.deal, place.version = own, place.ledger.round
            self._slots = max(self._slots, own.end)
        self._lost += open_then.values()

    def _next(self, name: str, place: _LivingIsland) -> dict[str, Any]:
        """Answers an island with the newest state and the next round."""
        if place.deal is None and self._slots < self._total:
            steps = min(self._section.steps, self._total - self._slots)
            place.deal = Deal(self._slots, steps, (name,), self._slots)
            self._slots += steps
        elif place.deal is None and any(each.deal is not None for each in self._places.values()):
            return {"state": "wait", "committed": place.committed}
        place.given, place.version, state = dict(self._shards), self.version, "take"
        deal = place.deal
        if deal is None:
            deal, state = Deal(self._slots, 0, (name,), self._slots), "end"
        tails = [Tail(each, p.deal.first, p.deal.end) for each, p in self._places.items() if p.deal and each != name]
        ledger = Ledger(self.version, self._lineage, deal, tails=tuple(tails))
        lost, place.telling = self._lost[place.told :], len(self._lost)
        return {
            "state": state,
            "ledger": ledger.plain(),
            "islands": sorted(self._places),
            "lost": [list(each) for each in lost],
            "committed": place.committed,
        }

    def _confirm_receipt(self, place: _LivingIsland) -> None:
        """Notes that the island has received the last answer, and so knows the lost slots that it named."""
        place.told = place.telling
        self._told = max(self._told, place.told)

    def _update(self, gradients: Mapping[int, Tensor], weight: float) -> None:
        lr, mu = self._section.outer.lr, self._section.outer.momentum
        self.version, self._since = self.version + 1, self._since + 1
        refresh = self._since >= len(self._places)
        for rank, gradient in gradients.items():
            weights, momentum = self._shards[rank]
            weights = weights.sub(gradient, alpha=lr * weight)
            if mu:
                self._buffers[rank].add_(gradient, alpha=weight)
            if mu and refresh:
                momentum = momentum.mul(mu).add_(self._buffers[rank])
                weights.sub_(momentum, alpha=lr * mu)
                self._buffers[rank].zero_()
            self._shards[rank] = OuterShard(weights, momentum)
        if refresh:
            self._since = 0

    def _drop_silent(self) -> None:
        now = self._clock()
        for name in [name for name, place in self._places.items() if now - place.seen > SILENT_S]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        deal = self._places.pop(name).deal
        if deal is not None:
            self._lost.append(Tail(name, deal.first, deal.end))


def _rank(ledger: Ledger) -> tuple[int, int]:
    return ledger.round, ledger.slots
