"""Simulates training on islands behind slow links: rounds of local steps, exchanges, failures. No real time passes.

An island trains H steps alone (DiLoCo: Douillard et al. 2023, arXiv:2311.08105); then all islands exchange their
updates and continue. Events are the ends of rounds and exchanges. Between two events training is a known function of
time: a week of 64 islands takes a moment.

- An exchange begins when the last participant has finished its steps; `island_exchange` computes its cost. The process
  group of the exchange before is kept if the participants are the same and that exchange was less than 200 s ago. With
  a delay of d steps (Douillard et al. 2025, arXiv:2501.18512) an island trains d steps of the next round during the
  exchange, and waits only if the exchange takes longer.
- With F fragments a part of the parameters is exchanged every H / F steps: the same bytes, in more exchanges.
- Without waiting (asynchronous) an island sends its change to the holder of the weights and gets the newest weights
  back; the holder's link serves one island after another.
- Islands fail independently, as Poisson processes. The steps of a failed island since its last exchange are lost, and
  the other islands wait `detect_s` for it, once. It restarts after `restart_s`, loads a peer's state over its link in
  the next exchange, and takes part from then on. Three exchanges form a new group: without the island, with it, and
  after its state was sent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.island_simulator.island_exchange import Exchange, Island, bytes_sent, exchange_s
from pipeline.run.groups.islands.ledger import KEPT_NS


@dataclass(frozen=True)
class Failures:
    """Failures of islands.

    Attributes:
        mtbf_s: mean time between failures of one island.
        detect_s: seconds until the other islands continue without a failed one.
        restart_s: seconds from a failure until the island can train again.
    """

    mtbf_s: float = math.inf
    detect_s: float = 5.0
    restart_s: float = 60.0


@dataclass
class IslandTime:
    """Time of all islands by its use, in seconds of one island.

    Attributes:
        training: seconds of steps that are in the model.
        exchange: seconds of waiting for links.
        waiting: seconds of waiting for slower islands, and for the detection of failed ones.
        lost: seconds of steps that were lost when their island failed.
        down: seconds in which islands had failed, restarted, or waited to take part again.
    """

    training: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0
    lost: float = 0.0
    down: float = 0.0

    def shares(self) -> dict[str, float]:
        """Each part as a share of their sum."""
        parts = asdict(self)
        total = sum(parts.values())
        return {name: seconds / total for name, seconds in parts.items()}


@dataclass(frozen=True)
class SimulatedIslands:
    """A simulated run.

    Attributes:
        seconds: duration of the run.
        time: use of the islands' time.
        steps: number of local steps of all islands that are in the model.
        exchanges: number of exchanges that all participants finished; if asynchronous, of single islands' exchanges.
        bytes_sent: bytes that the busiest island sent.
        failures: number of failures of islands.
    """

    seconds: float
    time: IslandTime
    steps: float
    exchanges: int
    bytes_sent: float
    failures: int

    @property
    def efficiency(self) -> float:
        """Steps in the model, divided by the steps of the same islands if they never waited, exchanged or failed."""
        return self.time.shares()["training"]


def simulate_islands(
    islands: Sequence[Island], exchange: Exchange, *, seconds: float, failures: Failures | None = None, seed: int = 0
) -> SimulatedIslands:
    """Simulates a run of a given length.

    Args:
        islands: one or more islands; without waiting, the first one's site has the weights.
        exchange: data and times of the exchanges.
        seconds: time at which the run ends; the current round is finished.
        failures: failures of islands; None for none.
        seed: seed of the failures.
    """
    kind = _WithoutWaiting if exchange.collective == "none" else _Rounds
    return kind(islands, exchange, failures or Failures(), random.Random(seed)).run(seconds)


@dataclass
class _Member:
    """An island during the run.

    Attributes:
        island: the simulated island.
        dies: time of its next failure.
        began: time up to which its use is recorded.
        ahead: seconds of steps of the current round that it trained during the exchange before the round.
        back: for a failed island, the time when it can train again; None otherwise.
    """

    island: Island
    dies: float
    began: float = 0.0
    ahead: float = 0.0
    back: float | None = None

    def done(self, steps: int) -> float:
        """Time at which the island has finished the current round's steps."""
        return self.began + steps * self.island.step_s - self.ahead


class _Run:
    """State and accounting that both ways of exchanging share."""

    def __init__(
        self, islands: Sequence[Island], exchange: Exchange, failures: Failures, numbers: random.Random
    ) -> None:
        self.exchange, self.failures, self.numbers = exchange, failures, numbers
        self.between = exchange.steps // exchange.fragments
        self.members = [_Member(island, self._next_failure(0.0)) for island in islands]
        self.time = IslandTime()
        self.steps = self.failed = self.exchanges = 0

    def _next_failure(self, now: float) -> float:
        mtbf = self.failures.mtbf_s
        return now + (self.numbers.expovariate(1 / mtbf) if mtbf < math.inf else math.inf)

    def _train(self, member: _Member, done: float, end: float) -> float:
        """Records a round that counts, and steps of the next round during the exchange; returns the idle seconds."""
        self.steps += self.between
        ahead = min(self.exchange.delay * member.island.step_s, end - done)
        self.time.training += done - member.began + ahead
        member.began, member.ahead = end, ahead
        return end - done - ahead

    def _die(self, member: _Member) -> None:
        """Records a failure: the island's steps since its last exchange are lost."""
        self.failed += 1
        self.time.lost += max(0.0, member.dies - member.began) + member.ahead
        self.time.training -= member.ahead
        member.began, member.ahead = max(member.began, member.dies), 0.0
        member.back = member.dies + self.failures.restart_s

    def _return(self, member: _Member, now: float, *, loads: bool) -> None:
        """Lets an island train again, once it has loaded a peer's state."""
        loaded = now + (member.island.link.seconds(self.exchange.state_bytes) if loads else 0.0)
        self.time.down += loaded - member.began
        member.began, member.back, member.dies = loaded, None, self._next_failure(loaded)


class _Rounds(_Run):
    """Simulation in which all participants exchange together."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.group, self.group_used = list[_Member](), -math.inf  # group of the last exchange; its end

    def run(self, seconds: float) -> SimulatedIslands:
        now = sent = 0.0
        while now < seconds:
            alive = [member for member in self.members if member.back is None]
            if not alive:  # the first island to return continues from its checkpoint
                first = min(self.members, key=lambda member: member.back or 0.0)
                now = max(now, first.back or 0.0)
                self._return(first, now, loads=False)
                continue
            done = {id(member): member.done(self.between) for member in alive}
            here, ready, end = self._gathered(alive, done)
            if not here:
                now = max(now, *(member.began for member in alive))
                continue
            now, joining = end, self._joining(ready)
            # a group in which a state was sent is not kept
            self.group, self.group_used = [] if joining else here, now
            self.exchanges += 1
            sent += bytes_sent(len(here), self.exchange)
            for member in here:
                own = done[id(member)]
                idle = self._train(member, own, now)
                # steps of the next round run first while others still train, then during the exchange
                waited = min(idle, max(0.0, ready - own - member.ahead))
                self.time.waiting += waited
                self.time.exchange += idle - waited
            for member in joining:
                self._return(member, now, loads=True)
        return SimulatedIslands(now, self.time, self.steps, self.exchanges, sent, self.failed)

    def _gathered(self, alive: list[_Member], done: dict[int, float]) -> tuple[list[_Member], float, float]:
        """Participants, begin and end of an exchange; islands that fail before or during it are left out."""
        here = list(alive)
        ready = end = max(done.values())
        while here:
            end = self._end(here, ready)
            dead = [member for member in here if member.dies < max(end, done[id(member)])]
            if not dead:
                break
            here = [member for member in here if member not in dead]
            noticed = max(member.dies for member in dead) + self.failures.detect_s
            ready = max([noticed, *(done[id(member)] for member in here)])
            for member in dead:
                self._die(member)
        return here, ready, end

    def _joining(self, ready: float) -> list[_Member]:
        """The islands that have returned when an exchange begins, and load a state in it."""
        return [member for member in self.members if member.back is not None and member.back <= ready]

    def _end(self, here: list[_Member], ready: float) -> float:
        """The end of an exchange that begins at `ready`."""
        same = [id(member) for member in here] == [id(member) for member in self.group] and not self._joining(ready)
        kept = same and ready - self.group_used < KEPT_NS / 1e9
        return ready + exchange_s([member.island for member in here], self.exchange, kept=kept)


class _WithoutWaiting(_Run):
    """Simulation in which every island exchanges alone; the holder's link serves one at a time, both ways."""

    def run(self, seconds: float) -> SimulatedIslands:
        now = free = 0.0
        holder, sent = self.members[0], [0.0] * len(self.members)
        size = self.exchange.bytes / self.exchange.fragments
        while now < seconds:
            i = min(range(len(sent)), key=lambda j: min(self.members[j].done(self.between), self.members[j].dies))
            member = self.members[i]
            done = member.done(self.between)
            now = max(now, min(done, member.dies))
            if member.dies < done:
                self._die(member)
                self._return(member, member.dies + self.failures.restart_s, loads=True)
                continue
            end = done
            if member is not holder:
                own = member.island.link
                takes = size / min(own.bandwidth, holder.island.link.bandwidth)
                free = max(done, free) + takes  # the changes have arrived; the weights are sent back
                end = free + 2 * own.latency_s + takes
                sent[i] += size
                sent[0] += size
            self.time.exchange += self._train(member, done, end)
            self.exchanges += 1
        return SimulatedIslands(now, self.time, self.steps, self.exchanges, max(sent), self.failed)
