"""Which samples which island trains: rounds, what each is dealt, and what a quorum decides. No torch, no network.

The order of samples is the run's own (law 1): sample i is the same for any number of islands. It is dealt in *slots*,
each one global batch: slot k holds samples k * B to (k + 1) * B - 1. A round deals `steps` consecutive slots to each of
its islands, by their names. The next round begins behind the last slot that this one has dealt, so that no slot is
dealt twice by islands that live; slots of an island that did not contribute to the exchange are lost, and named.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Deal:
    """The slots of one round.

    Attributes:
        first: the first slot of the round.
        steps: slots of each island: inner steps of the round.
        names: its islands, sorted.
        step: inner steps of the run before the round.
    """

    first: int
    steps: int
    names: tuple[str, ...]
    step: int

    @property
    def end(self) -> int:
        """The first slot behind the round."""
        return self.first + self.steps * len(self.names)

    @property
    def last_step(self) -> int:
        """The inner step after which the round ends."""
        return self.step + self.steps

    def slots(self, name: str) -> range:
        """The slots of an island; none for one that came later."""
        if name not in self.names:
            return range(0)
        begin = self.first + self.names.index(name) * self.steps
        return range(begin, begin + self.steps)


@dataclass(frozen=True)
class Ledger:
    """Where the islands of a run stand; the same on all that share a commit.

    Attributes:
        round: exchanges so far.
        commit: names the sequence of decisions that has led here; equal commits have equal outer weights.
        deal: the round that is being trained; None before the first.
    """

    round: int = 0
    commit: str = ""
    deal: Deal | None = None

    @property
    def slots(self) -> int:
        """Slots dealt so far."""
        return self.deal.end if self.deal else 0

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Ledger:
        """The inverse of `plain`."""
        deal = plain["deal"]
        made = None if deal is None else Deal(**{**deal, "names": tuple(deal["names"])})
        return cls(plain["round"], plain["commit"], made)


@dataclass(frozen=True)
class Member:
    """What an island reports when it asks for a quorum.

    Attributes:
        name: of the island.
        ledger: where it stands.
        step: inner steps that it has done.
        living: it has been part of a quorum since it was started: its weights are those of its commit.
        waited: it has waited for the other islands long enough at the start.
        layout: digest of names, shapes and offsets of its shards on all ranks.
    """

    name: str
    ledger: Ledger
    step: int
    living: bool
    waited: bool
    layout: str

    @property
    def trained(self) -> bool:
        """Whether it has a pseudo-gradient of a whole round to contribute; a round of no steps ends the run."""
        deal = self.ledger.deal
        return deal is not None and deal.steps > 0 and self.name in deal.names and self.step == deal.last_step

    @property
    def midway(self) -> bool:
        """Whether it has trained a part of a round."""
        deal = self.ledger.deal
        return deal is not None and self.name in deal.names and deal.step < self.step < deal.last_step

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "ledger": self.ledger.plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Member:
        """The inverse of `plain`."""
        return cls(**{**plain, "ledger": Ledger.from_plain(plain["ledger"])})


@dataclass(frozen=True)
class Decision:
    """What the islands of a quorum do; every one of them decides the same.

    Attributes:
        names: the islands, sorted: their ranks in the exchange.
        source: index of the island whose state the others take.
        contributors: indices of those whose pseudo-gradients are averaged; none where a run begins or is resumed.
        healed: indices of those that take the state of `source`.
        ledger: where all of them stand afterwards.
        step: inner steps that all of them have done afterwards, but those that go on in the middle of a round.
        lost: island -> slots of the round that ends here that were dealt and not contributed.
    """

    names: tuple[str, ...]
    source: int
    contributors: tuple[int, ...]
    healed: tuple[int, ...]
    ledger: Ledger
    step: int
    lost: dict[str, range]


def decide(members: Sequence[Member], *, steps: int, total: int, quorum: int) -> Decision:
    """What a quorum does: a pure function of what its islands have reported.

    Islands that live come before those that were just started, whose checkpoint may be of another sequence of
    decisions; then the latest round counts, then the most islands.

    Args:
        members: of the quorum, in any order; names are unique.
        steps: inner steps of a round; the last one may be shorter.
        total: inner steps of the run.
        quorum: number of the quorum.
    """
    members = sorted(members, key=lambda each: each.name)
    names = tuple(each.name for each in members)
    living = [each for each in members if each.living] or members
    sharing = Counter(each.ledger.commit for each in living)
    best = max(living, key=lambda each: (each.ledger.round, sharing[each.ledger.commit], each.step))
    same = [n for n, each in enumerate(members) if each.ledger.commit == best.ledger.commit]
    if not best.living:  # checkpoints of different steps of one round are told apart
        same = [n for n in same if members[n].midway or members[n].step == best.step]
    healed = tuple(n for n in range(len(members)) if n not in same)
    contributors = tuple(n for n in same if members[n].trained and members[n].living == best.living)
    midway = any(members[n].midway for n in same)
    if midway and not best.living:  # started again together: those that have finished the round wait for the others
        contributors = ()
    midway = midway and not contributors
    source, ledger, step, lost = names.index(best.name), best.ledger, best.step, dict[str, range]()
    if contributors:
        deal = best.ledger.deal
        assert deal is not None
        given = {names[n] for n in contributors}
        lost = {name: deal.slots(name) for name in deal.names if name not in given}
        source = contributors[0]
        ledger = replace(ledger, round=ledger.round + 1)
    if not midway:
        # a round that nobody has trained is dealt anew: to those that are here
        untrained = ledger.deal is not None and not contributors
        first = ledger.deal.first if untrained and ledger.deal else ledger.slots
        deal = Deal(first, min(steps, total - step), names, step)
        commit = hashlib.sha256(f"{ledger.commit} {quorum} {names} {contributors}".encode()).hexdigest()[:16]
        ledger = replace(ledger, deal=deal, commit=commit)
    return Decision(names, source, contributors, healed, ledger, step, lost)


def compatible(members: Sequence[Member]) -> tuple[Member, ...]:
    """The members whose ranks hold the same shards as those of the first that lives, or of the first by name."""
    ordered = sorted(members, key=lambda each: (not each.living, each.name))
    return tuple(each for each in members if each.layout == ordered[0].layout)
