"""Who is slow: every rank's own time, gathered now and then, and the rank that needs longer than its peers.

Peers do the same work: ranks of one pipeline stage, and with ring attention, where later pieces of a sequence see more
of it, of one piece. A rank without peers is compared with nobody.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline.config.schema import StragglersSection
from pipeline.metrics.own_time import CoreClock, host_seconds, kernel_seconds, profiled
from pipeline.topology import Topology

T = TypeVar("T")
_REMEMBERED = 10
"""Reports from which is learned how much own times vary."""
_HEARD = 3
"""Reports before anybody is named: fewer say too little about how much they vary."""
_TOLD = 3
"""Ranks that a row of the journal lists, slowest first."""
_SHORT_S, _SHARE = 5.0, 0.005
"""A report may take so long, or this share of the time. A profile takes 5 to 10 us and 2 KB for each span, of which an
operator has one or a few: 10 s and 2 GB on each rank for a million of them (80 layers, 64 micro-batches)."""


@dataclass(frozen=True)
class OwnTime:
    """What a rank needs for its part of a step, in seconds. A clock that was not read is 0; see `own_time`.

    Attributes:
        host: of the profiled step.
        cores: median of the steps since the report before.
        kernels: of the profiled step.
        loading: waiting for the data loader, mean per step since the report before.
    """

    host: float
    cores: float
    kernels: float
    loading: float

    @property
    def seconds(self) -> float:
        """All of it, or 0 where no clock was read. The clocks overlap, loading comes before."""
        longest = max(self.host, self.cores, self.kernels)
        return longest and longest + self.loading


@dataclass(frozen=True)
class StragglerReport:
    """Own times of all ranks at one step.

    Attributes:
        times: by rank.
        ratios: own time by the median of the peers' own times.
        named: ranks that are found slow, and were not in the report before.
        hosts: by rank.
        seconds: that its profile took on the rank where it took longest.
        every: steps between reports from now on, when that has just changed.
    """

    times: Sequence[OwnTime]
    ratios: Sequence[float]
    named: Sequence[int]
    hosts: Sequence[str]
    seconds: float = 0.0
    every: int | None = None

    def row(self) -> dict[str, Any]:
        """Values of an event in the journal."""
        seconds = [each.seconds for each in self.times]
        slowest = sorted(range(len(seconds)), key=lambda rank: -self.ratios[rank])[:_TOLD]
        return {
            "seconds": {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)},
            "slowest": [self._told(rank) for rank in slowest],
        }

    def lines(self) -> list[str]:
        """One for each rank that was found slow just now, and one when reports are to come less often."""
        sparser = (
            f"a report of who is slow takes {self.seconds:.1f} s: from now on there is one every {self.every} steps"
        )
        return [
            f"warning: rank {rank} on {self.hosts[rank]} needs {self.ratios[rank]:.2f} times the median's time for its"
            f" own work ({self.times[rank].seconds:.3g} s per step; all others wait for it)"
            for rank in self.named
        ] + ([sparser] if self.every else [])

    def _told(self, rank: int) -> dict[str, Any]:
        own = self.times[rank]
        said = {"rank": rank, "host": self.hosts[rank], "seconds": own.seconds, "ratio": self.ratios[rank]}
        return said | asdict(own)


def peers_of(topology: Topology, *, ring: bool) -> list[Hashable]:
    """For every rank, what it shares with those who do the same work.

    Args:
        topology: of the run.
        ring: context parallelism exchanges attention in a ring.
    """
    places = (topology.coordinates(rank) for rank in range(topology.world_size))
    return [(place["pp"], place["cp"] if ring else 0) for place in places]


class Stragglers:
    """Measures this rank, and gathers what all have measured.

    Args:
        section: how often, and what counts as slow.
        peers: from `peers_of`.
        rank: of this process.
        gpu: whether it computes on one.
    """

    def __init__(self, section: StragglersSection, *, peers: Sequence[Hashable], rank: int, gpu: bool) -> None:
        self._every = section.every if len(peers) > 1 else None
        self._judge = StragglerDetector(peers, threshold=section.threshold)
        self._rank, self._gpu = rank, gpu
        self._clock, self._hosts = CoreClock(), list[str]()
        self._forget()

    def _forget(self) -> None:
        self._since, self._cost = time.perf_counter(), 0.0
        self._host = self._kernels = 0.0
        self._cores: list[float] = []
        self._loading: list[float] = []

    def timed(self, steps: Iterable[T]) -> Iterator[T]:
        """The same steps; how long each is waited for is noted."""
        coming = iter(steps)
        while True:
            started = time.perf_counter()
            try:
                step = next(coming)
            except StopIteration:
                return
            if self._every is not None:
                self._loading.append(time.perf_counter() - started)
            yield step

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        """Around what a rank does in a step together with the others."""
        if self._every is None:
            yield
        elif step % self._every == 0:
            with profiled(gpu=self._gpu) as spans:
                yield
                done = time.perf_counter()
            self._host, self._kernels = host_seconds(spans), kernel_seconds(spans)
            self._cost = time.perf_counter() - done
        else:
            started = self._clock.seconds()
            yield
            if not self._gpu:  # who waits for a GPU does so on a core
                self._cores.append(self._clock.seconds() - started)

    def report(self, step: int) -> StragglerReport | None:
        """Gathers and judges, when it is time: collective then. None on ranks other than 0, and at other steps."""
        if self._every is None or step % self._every:
            return None
        cores = statistics.median(self._cores) if self._cores else 0.0
        own = OwnTime(self._host, cores, self._kernels, statistics.fmean(self._loading or [0.0]))
        cost, share = self._cost, self._cost / (time.perf_counter() - self._since)
        self._forget()
        mine = torch.tensor([cost, share, *asdict(own).values()], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        if not self._hosts:
            self._hosts = [""] * len(found)
            dist.all_gather_object(self._hosts, socket.gethostname())
        cost, share = (max(float(each[place]) for each in found) for place in (0, 1))  # all decide alike
        sparser = cost > _SHORT_S and share > _SHARE
        if sparser:
            self._every *= 2
        if self._rank != 0:
            return None
        times = [OwnTime(*each[2:].tolist()) for each in found]
        ratios, named = self._judge.hear([each.seconds for each in times])
        return StragglerReport(times, ratios, named, self._hosts, cost, self._every if sparser else None)


class StragglerDetector:
    """Says who is slow, from one report to the next.

    Slow is who needs more than its peers in two reports in a row: by `threshold`, and by twice what own times differ by
    between reports (the median of their absolute logarithmic differences, times 1.4826 as for a normal distribution:
    Rousseeuw and Croux 1993, Alternatives to the Median Absolute Deviation). On cores that are shared with others a
    step of milliseconds may take a fifth longer than the one before, and a rank has to be slower than that.

    Args:
        peers: for every rank, what it shares with those who do the same work.
        threshold: 0.1 is 10 %.
    """

    def __init__(self, peers: Sequence[Hashable], *, threshold: float) -> None:
        self._peers = peers
        self._threshold = threshold
        self._heard: deque[Sequence[float]] = deque(maxlen=_REMEMBERED)
        self._slow: set[int] = set()
        self._named: set[int] = set()

    def hear(self, seconds: Sequence[float]) -> tuple[list[float], list[int]]:
        """Takes a report.

        Args:
            seconds: every rank's own time; 0 where it could not be measured.

        Returns:
            every rank's ratio to the median of its peers (the lower one of two, so that two peers can be compared), and
            the ranks that are found slow now, and were not in the report before.
        """
        self._heard.append(seconds)
        ratios = self._ratios(seconds)
        bound = 1 + max(self._threshold, 2 * self._spread())
        slow = {rank for rank, ratio in enumerate(ratios) if ratio > bound}
        found = slow & self._slow if len(self._heard) >= _HEARD else set()
        new = sorted(found - self._named)
        self._slow, self._named = slow, found
        return ratios, new

    def _ratios(self, seconds: Sequence[float]) -> list[float]:
        groups: dict[Hashable, list[float]] = defaultdict(list)
        for peers, own in zip(self._peers, seconds, strict=True):
            groups[peers].append(own)
        medians = {peers: statistics.median_low(each) for peers, each in groups.items()}
        pairs = zip(self._peers, seconds, strict=True)
        return [own / medians[peers] if medians[peers] > 0 else 1.0 for peers, own in pairs]

    def _spread(self) -> float:
        """How much a rank's own time differs between reports, as a share."""
        pairs = (pair for before, after in pairwise(self._heard) for pair in zip(before, after, strict=True))
        steps = [abs(math.log(b / a)) for a, b in pairs if a > 0 and b > 0]
        return 1.4826 * statistics.median(steps) if steps else 0.0
