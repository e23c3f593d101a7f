"""The samples that each island trains: rounds, their deals, and the decisions of a quorum. No torch, no network.

The order of samples is the run's own (law 1): sample i is the same for any number of islands. It is dealt in *slots*,
each one global batch: slot k holds samples k * B to (k + 1) * B - 1. A round deals `steps` consecutive slots to each of
its islands, in the order of their names. The next round begins after the last slot dealt so far: no two living islands
get the same slot. Slots of an island that did not contribute to the exchange are lost, and reported.

An exchange that overlaps with training takes its pseudo-gradients `after` steps before the round ends. The steps
trained after that, the round's *tail*, enter the pseudo-gradients of the next exchange.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

PlainReport = dict[str, Any]
"""A report or decision of a quorum, as plain JSON."""

KEPT_NS = 200 * 10**9
"""Nanoseconds without use after which a process group is formed anew: NAT gateways and firewalls silently drop idle
connections, some after 240 s, and noticing it takes `islands.timeout_s`."""


@dataclass(frozen=True)
class Deal:
    """The slots of one round.

    Attributes:
        first: the first slot of the round.
        steps: number of slots of each island, which is the number of inner steps of the round.
        names: names of the round's islands, sorted.
        step: number of inner steps of the run before the round.
        after: number of steps at the end of the round that are trained during its exchange.
    """

    first: int
    steps: int
    names: tuple[str, ...]
    step: int
    after: int = 0

    @property
    def end(self) -> int:
        """The first slot after the round."""
        return self.first + self.steps * len(self.names)

    @property
    def last_step(self) -> int:
        """The inner step after which the round ends."""
        return self.step + self.steps

    @property
    def snapshot_step(self) -> int:
        """The inner step after which the round's pseudo-gradients are taken."""
        return self.last_step - self.after

    def slots(self, name: str) -> range:
        """Returns the slots of an island; none for an island that joined later."""
        if name not in self.names:
            return range(0)
        begin = self.first + self.names.index(name) * self.steps
        return range(begin, begin + self.steps)


class Tail(NamedTuple):
    """Slots `first` to `end` of the previous round, dealt to an island and not yet in a pseudo-gradient."""

    name: str
    first: int
    end: int

    @property
    def slots(self) -> range:
        """The slots as a range."""
        return range(self.first, self.end)


@dataclass(frozen=True)
class Ledger:
    """Progress of a run's islands; equal on all islands that share a commit.

    Attributes:
        round: number of exchanges so far.
        commit: name of the sequence of decisions so far; equal commits have equal outer weights.
        deal: the round that is being trained; None before the first.
        before: the previous round, while it has a tail.
        tails: tails of the previous round.
        start: number of slots that an ordinary run had trained before the islands began.
    """

    round: int = 0
    commit: str = ""
    deal: Deal | None = None
    before: Deal | None = None
    tails: tuple[Tail, ...] = ()
    start: int = 0

    @property
    def slots(self) -> int:
        """Number of slots dealt so far."""
        return self.deal.end if self.deal else self.start

    def in_tail(self, name: str, step: int) -> bool:
        """Tells whether an island after `step` inner steps still has to train steps of the previous round."""
        before, deal = self.before, self.deal
        return before is not None and deal is not None and name in before.names and step < deal.step

    def deal_of(self, name: str, step: int) -> Deal | None:
        """Returns the round whose slots an island trains after `step` inner steps."""
        return self.before if self.in_tail(name, step) else self.deal

    def renamed(self, old: str, new: str) -> Ledger:
        """Returns the ledger with an island renamed; if the new name is in use, the two islands swap names.

        So each place keeps one name, also in the ledger of a copy, and two islands that have swapped folders agree.
        """
        names = {old: new, new: old}

        def other(deal: Deal | None) -> Deal | None:
            return deal and replace(deal, names=tuple(names.get(each, each) for each in deal.names))

        tails = tuple(each._replace(name=names.get(each.name, each.name)) for each in self.tails)
        return replace(self, deal=other(self.deal), before=other(self.before), tails=tails)

    def plain(self) -> PlainReport:
        """Converts the fields to JSON."""
        return {**asdict(self), "tails": [list(each) for each in self.tails]}

    @classmethod
    def from_plain(cls, plain: PlainReport) -> Ledger:
        """Inverts `plain`; older checkpoints have neither tails nor start."""

        def made(deal: PlainReport | None) -> Deal | None:
            return None if deal is None else Deal(**{**deal, "names": tuple(deal["names"])})

        tails = tuple(Tail(*each) for each in plain.get("tails", ()))
        return cls(
            plain["round"],
            plain["commit"],
            made(plain["deal"]),
            made(plain.get("before")),
            tails,
            plain.get("start", 0),
        )


@dataclass(frozen=True)
class Member:
    """Report of an island that asks for a quorum.

    Attributes:
        ledger: the island's ledger.
        step: number of inner steps that the island has done.
        living: whether it has been part of a quorum since it was started; its weights are then those of its commit.
        waited: whether it has waited for the other islands long enough at the start.
        layout: digest of the keys that determine its run's loss curve, and of names, shapes and offsets of its shards
            on all ranks.
        group: process group in which its last exchange succeeded on all of its ranks; empty without such an exchange.
        group_used: time when that exchange ended on this island, in ns by the lighthouse's clock.
    """

    name: str
    ledger: Ledger
    step: int
    living: bool
    waited: bool
    layout: str
    group: str = ""
    group_used: int = 0

    @property
    def trained(self) -> bool:
        """Whether it has a whole round's pseudo-gradient to contribute; a round of no steps ends the run."""
        deal = self.ledger.deal
        if deal is None or not deal.steps or self.name not in deal.names:
            return False
        return deal.snapshot_step <= self.step <= deal.last_step

    @property
    def midway(self) -> bool:
        """Whether it has trained a part of a round."""
        deal = self.ledger.deal
        if self.ledger.in_tail(self.name, self.step):
            return True
        return deal is not None and self.name in deal.names and deal.step < self.step < deal.snapshot_step

    def plain(self) -> PlainReport:
        """Converts the fields to JSON."""
        return {**asdict(self), "ledger": self.ledger.plain()}

    @classmethod
    def from_plain(cls, plain: PlainReport) -> Member:
        """Inverts `plain`."""
        return cls(**{**plain, "ledger": Ledger.from_plain(plain["ledger"])})


@dataclass(frozen=True)
class Decision:
    """Decision of a quorum on its islands' next actions; every island decides the same.

    Attributes:
        names: sorted names of the islands; their indices are their ranks in the exchange.
        source: index of the island whose state others take.
        contributors: indices of islands whose pseudo-gradients are averaged; empty where a run begins or is resumed.
        healed: indices of islands that take the state of `source`.
        ledger: ledger of all islands after the decision.
        step: number of inner steps that islands have done after the decision, except islands that go on in mid-round.
        ended: round whose pseudo-gradients are averaged; None without pseudo-gradients.
        trained: island -> slots of the round in its pseudo-gradient.
        lost: island -> slots of the round that were dealt but not contributed.
        tail_trained: like `trained`, for the tails of the previous round.
        tail_lost: like `lost`, for the tails of the previous round.
        group: name of the process group of the exchange.
        formed: whether every island already has the group, nothing has failed in it, and it was used recently.
    """

    names: tuple[str, ...]
    source: int
    contributors: tuple[int, ...]
    healed: tuple[int, ...]
    ledger: Ledger
    step: int
    ended: Deal | None = None
    trained: dict[str, range] = field(default_factory=dict)
    lost: dict[str, range] = field(default_factory=dict)
    tail_trained: dict[str, range] = field(default_factory=dict)
    tail_lost: dict[str, range] = field(default_factory=dict)
    group: str = ""
    formed: bool = False


def decide(members: Sequence[Member], *, steps: int, total: int, quorum: int, overlap: int = 0) -> Decision:
    """Decides the next actions of a quorum: a pure function of its islands' reports.

    Living islands come before islands just started, whose checkpoints may belong to another sequence of decisions; then
    the latest round counts, then the most islands.

    Args:
        members: reports of the quorum's islands, in any order; names are unique.
        steps: number of inner steps of a round; the last round may be shorter.
        total: number of inner steps of the run.
        quorum: number of the quorum.
        overlap: number of steps of a round that are trained during its exchange; none in the last round.
    """
    members = sorted(members, key=lambda each: each.name)
    names = tuple(each.name for each in members)
    living = [each for each in members if each.living] or members
    sharing = Counter(each.ledger.commit for each in living)
    best = max(living, key=lambda each: (each.ledger.round, sharing[each.ledger.commit], each.step))
    # not by the commit alone: a copied folder has the same commit under other names
    same = [n for n, each in enumerate(members) if each.ledger == best.ledger]
    if not best.living:  # distinguishes checkpoints of different steps of one round
        begin = best.ledger.deal.step if best.ledger.deal else best.step
        same = [n for n in same if members[n].midway or members[n].trained or members[n].step in (begin, best.step)]
    healed = tuple(n for n in range(len(members)) if n not in same)
    contributors = tuple(n for n in same if members[n].trained and members[n].living == best.living)
    midway = any(members[n].midway for n in same)
    if midway and not best.living:  # restarted together: islands that have finished the round wait for the others
        contributors = ()
    group, formed = _group(members, quorum)
    decision = Decision(
        names, names.index(best.name), contributors, healed, best.ledger, best.step, group=group, formed=formed
    )
    decision = _contributed(decision, members) if contributors else _without_tails(decision)
    if midway and not contributors:
        assert decision.ledger.deal is not None
        # an island that takes the outer weights in mid-round has trained none of its part
        return replace(decision, step=decision.ledger.deal.step)
    # a round that no island has trained is dealt anew to the present islands
    ledger, step = decision.ledger, decision.step
    untrained = ledger.deal is not None and not contributors
    first = ledger.deal.first if untrained and ledger.deal else ledger.slots
    count = min(steps, total - step)
    deal = Deal(first, count, names, step, after=overlap if step + count < total else 0)
    commit = hashlib.sha256(f"{ledger.commit} {quorum} {names} {contributors}".encode()).hexdigest()[:16]
    return replace(decision, ledger=replace(ledger, deal=deal, commit=commit))


def process_group(reported: Collection[str], names: Sequence[str], quorum: int) -> tuple[str, bool]:
    """Returns the name of the process group of a quorum's members, and whether all members already have it.

    Args:
        reported: process groups that the members have; empty where no group may be kept.
        names: names of all members, in order.
        quorum: number of the quorum, which names a new group.
    """
    members = ",".join(names)
    known = next(iter(reported)) if len(set(reported)) == 1 else ""
    formed = known.partition("/")[2] == members
    return (known if formed else f"{quorum}/{members}"), formed


def _group(members: Sequence[Member], quorum: int) -> tuple[str, bool]:
    """Returns the process group of an exchange, and whether all members have it.

    Each member reports the group in which its last exchange succeeded, so all know whether a member has lost it.
    """
    used = all(0 <= quorum - each.group_used < KEPT_NS for each in members)
    return process_group([each.group for each in members] if used else (), [each.name for each in members], quorum)


def _contributed(decision: Decision, members: Sequence[Member]) -> Decision:
    """Adds to a decision the fate of the ending round's slots, and of the previous round's tails."""
    ledger, deal = decision.ledger, decision.ledger.deal
    assert deal is not None
    given = {members[n].name: deal.slots(members[n].name)[: members[n].step - deal.step] for n in decision.contributors}
    rest = {name: deal.slots(name)[len(slots) :] for name, slots in given.items()}
    tails = tuple(Tail(name, slots.start, slots.stop) for name, slots in rest.items() if slots)
    return replace(
        decision,
        source=decision.contributors[0],
        ledger=replace(ledger, round=ledger.round + 1, before=deal if tails else None, tails=tails),
        step=deal.last_step,
        ended=deal,
        trained=given,
        lost={name: deal.slots(name) for name in deal.names if name not in given},
        tail_trained={each.name: each.slots for each in ledger.tails if each.name in given},
        tail_lost={each.name: each.slots for each in ledger.tails if each.name not in given},
    )


def _without_tails(decision: Decision) -> Decision:
    """Marks the tails of islands that take another island's state as lost, since their training is dropped."""
    ledger, healed = decision.ledger, [decision.names[n] for n in decision.healed]
    lost = {each.name: each.slots for each in ledger.tails if each.name in healed}
    tails = tuple(each for each in ledger.tails if each.name not in healed)
    ledger = replace(ledger, tails=tails, before=ledger.before if tails else None)
    return replace(decision, ledger=ledger, tail_lost=lost)


def compatible(members: Sequence[Member]) -> tuple[Member, ...]:
    """Returns the members with the curve and shards of the first living member, or else of the first by name."""
    ordered = sorted(members, key=lambda each: (not each.living, each.name))
    return tuple(each for each in members if each.layout == ordered[0].layout)
