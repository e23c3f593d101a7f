"""Straggler detection: gathers every rank's own time periodically and reports ranks slower than their peers.

Peers do the same work: ranks of one pipeline stage. A rank without peers is not compared.
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
from typing import TypeVar

import torch
import torch.distributed as dist

from pipeline.config.batch import BatchSizes
from pipeline.config.sections.run import StragglersSection
from pipeline.config.topology import Topology
from pipeline.runtime.metrics.own_time import CoreClock, host_seconds, kernel_seconds, profiled
from pipeline.runtime.metrics.sinks import JournalRow

T = TypeVar("T")
_HISTORY = 10
"""Number of reports from which the variation of own times is estimated."""
_MIN_REPORTS = 3
"""Number of reports before any rank is named: with fewer reports the variation is unknown."""
_USUAL = 5
"""Number of newest reports whose median is a rank's usual own time."""
_LISTED_RANKS = 3
"""Number of ranks that a row of the journal lists, slowest first."""
_MAX_REPORT_S, _MAX_SHARE = 5.0, 0.005
"""Limits of the cost of a report, in seconds and as a share of the time; if both are exceeded, reports become rarer. A
profile takes 5 to 10 us and 2 KB per span, and an operator has one or a few spans: a million spans (80 layers, 64
micro-batches) take 10 s and 2 GB on each rank."""
_SPANS, _SPAN_S = 200, 10e-6
"""Number of spans of a decoder layer and micro-batch, forward and backward, and seconds per span; derived from these
figures."""
_AUTO_EVERY, _AUTO_MAX_S = 100, 2.0
"""Steps between reports if `stragglers.every` is auto, and seconds of a report above which there are no reports."""


@dataclass(frozen=True)
class OwnTime:
    """A rank's own time per step, in seconds. A clock that was not read is 0 (clocks: `own_time`).

    Attributes:
        host: seconds of the profiled step in which the host did not wait.
        cores: seconds on a core or in its run queue, median of the steps since the last report.
        kernels: seconds of GPU kernels in the profiled step.
        loading: seconds of waiting for the data loader, mean per step since the last report.
    """

    host: float
    cores: float
    kernels: float
    loading: float

    @property
    def seconds(self) -> float:
        """The largest clock value plus `loading`; 0 if no clock was read. The clocks overlap; loading precedes them."""
        longest = max(self.host, self.cores, self.kernels)
        return longest and longest + self.loading


@dataclass(frozen=True)
class StragglerReport:
    """Own times of all ranks at one step.

    Attributes:
        times: own times by rank.
        ratios: own time / median of the peers' own times, by rank.
        named: new stragglers: ranks found slow that the last report did not name.
        hosts: host names by rank.
        wait: seconds per step in which ranks wait for the slowest rank (`StragglerDetector.wait_seconds`).
        seconds: seconds of profiling, the largest of all ranks.
        every: new number of steps between reports if it has just changed; None otherwise.
    """

    times: Sequence[OwnTime]
    ratios: Sequence[float]
    named: Sequence[int]
    hosts: Sequence[str]
    wait: float = 0.0
    seconds: float = 0.0
    every: int | None = None

    def row(self) -> JournalRow:
        """Returns the values of an event in the journal."""
        seconds = [each.seconds for each in self.times]
        slowest = sorted(range(len(seconds)), key=lambda rank: -self.ratios[rank])[:_LISTED_RANKS]
        return {
            "seconds": {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)},
            "slowest": [self._entry(rank) for rank in slowest],
            "wait_seconds": self.wait,
        }

    def lines(self) -> list[str]:
        """Returns the warnings: one for each new straggler, and one if reports become less frequent."""
        rarer = f"a straggler report takes {self.seconds:.1f} s: from now on there is one every {self.every} steps"
        return [
            f"warning: straggler: rank {rank} on {self.hosts[rank]} takes {self.ratios[rank]:.2f} times the median of"
            f" its peers for its own work ({self.times[rank].seconds:.3g} s per step; all other ranks wait for it)"
            for rank in self.named
        ] + ([rarer] if self.every else [])

    def _entry(self, rank: int) -> JournalRow:
        own = self.times[rank]
        entry = {"rank": rank, "host": self.hosts[rank], "seconds": own.seconds, "ratio": self.ratios[rank]}
        return entry | asdict(own)


def peers_of(topology: Topology) -> list[Hashable]:
    """Returns the key of every rank's peer group: ranks with equal keys do the same work."""
    return [topology.coordinates(rank)["pp"] for rank in range(topology.world_size)]


def report_seconds(topology: Topology, batch: BatchSizes, *, layers: int) -> float:
    """Estimates the seconds that one report costs each rank: its profile has spans of every operator of a step.

    Args:
        topology: the mesh.
        batch: batch sizes, for the gradient accumulation.
        layers: decoder layers of the model.
    """
    return layers / topology.pp * batch.accumulation * _SPANS * _SPAN_S


def report_interval(section: StragglersSection, *, seconds: float) -> int | None:
    """Chooses the steps between reports; None for no reports. "auto" gives None if a report takes over two seconds."""
    if section.every == "auto":
        return _AUTO_EVERY if seconds <= _AUTO_MAX_S else None
    return section.every


class Stragglers:
    """Measures this rank's own time, and gathers the measurements of all ranks.

    Args:
        threshold: threshold from the section `stragglers`.
        every: steps between reports, from `report_interval`; None for no reports.
        peers: key of every rank's peer group, from `peers_of`.
        rank: this process's global rank.
        gpu: whether it computes on a GPU.
    """

    def __init__(self, *, threshold: float, every: int | None, peers: Sequence[Hashable], rank: int, gpu: bool) -> None:
        self._every = every if len(peers) > 1 else None
        self._detector = StragglerDetector(peers, threshold=threshold)
        self._rank, self._gpu = rank, gpu
        self._clock, self._hosts = CoreClock(), list[str]()
        self._reset()

    def _reset(self) -> None:
        self._since, self._cost = time.perf_counter(), 0.0
        self._host = self._kernels = 0.0
        self._cores: list[float] = []
        self._loading: list[float] = []

    def timed(self, steps: Iterable[T]) -> Iterator[T]:
        """Passes steps on and measures how long the loader takes for each."""
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

    def profiles(self, step: int) -> bool:
        """Tells whether a step is profiled; the same on all ranks."""
        return self._every is not None and step % self._every == 0

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        """Measures a step; a context manager around its forward, backward and update."""
        if self._every is None:
            yield
        elif self.profiles(step):
            with profiled(gpu=self._gpu) as spans:
                yield
                done = time.perf_counter()
            self._host, self._kernels = host_seconds(spans), kernel_seconds(spans)
            self._cost = time.perf_counter() - done
        else:
            started = self._clock.seconds()
            yield
            if not self._gpu:  # waiting for a GPU spins on a core
                self._cores.append(self._clock.seconds() - started)

    def report(self, step: int) -> StragglerReport | None:
        """Gathers and evaluates own times at report steps. Collective. Returns None at other steps and on ranks > 0."""
        if self._every is None or step % self._every:
            return None
        cores = statistics.median(self._cores) if self._cores else 0.0
        own = OwnTime(self._host, cores, self._kernels, statistics.fmean(self._loading or [0.0]))
        cost, share = self._cost, self._cost / (time.perf_counter() - self._since)
        self._reset()
        mine = torch.tensor([cost, share, *asdict(own).values()], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        if not self._hosts:
            self._hosts = [""] * len(found)
            dist.all_gather_object(self._hosts, socket.gethostname())
        cost, share = (max(float(each[place]) for each in found) for place in (0, 1))  # equal on all ranks
        rarer = cost > _MAX_REPORT_S and share > _MAX_SHARE
        if rarer:
            self._every *= 2
        if self._rank != 0:
            return None
        times = [OwnTime(*each[2:].tolist()) for each in found]
        ratios, named = self._detector.update([each.seconds for each in times])
        wait, every = self._detector.wait_seconds(), self._every if rarer else None
        return StragglerReport(times, ratios, named, self._hosts, wait, cost, every)


class StragglerDetector:
    """Finds stragglers in a sequence of reports.

    In two reports in a row, a straggler's own time exceeds its peers' by `threshold` and by twice the variation of own
    times between reports (the median of their absolute logarithmic differences, times 1.4826 as for a normal
    distribution: Rousseeuw and Croux 1993, Alternatives to the Median Absolute Deviation). The variation counts
    because, on shared cores, a step of milliseconds may take a fifth longer than the step before.

    Args:
        peers: key of every rank's peer group, from `peers_of`.
        threshold: relative slowness to report; 0.1 is 10 %.
    """

    def __init__(self, peers: Sequence[Hashable], *, threshold: float) -> None:
        self._peers = peers
        self._threshold = threshold
        self._reports: deque[Sequence[float]] = deque(maxlen=_HISTORY)
        self._slow: set[int] = set()
        self._named: set[int] = set()

    def update(self, seconds: Sequence[float]) -> tuple[list[float], list[int]]:
        """Adds a report and finds new stragglers.

        Args:
            seconds: every rank's own time; 0 if it could not be measured.

        Returns:
            every rank's ratio to the median of its peers (the lower median: of two peers, the faster), and the new
            stragglers: ranks that are found slow now but were not in the last report.
        """
        self._reports.append(seconds)
        ratios = self._ratios(seconds)
        bound = 1 + max(self._threshold, 2 * self._spread())
        slow = {rank for rank, ratio in enumerate(ratios) if ratio > bound}
        found = slow & self._slow if len(self._reports) >= _MIN_REPORTS else set()
        new = sorted(found - self._named)
        self._slow, self._named = slow, found
        return ratios, new

    def wait_seconds(self) -> float:
        """Estimates seconds per step of waiting for the slowest rank: its own time minus its peers' median.

        Each rank's own time is the median of its newest reports, since any rank may have a single slow step.
        """
        if not self._reports:
            return 0.0
        newest = list(self._reports)[-_USUAL:]
        usual = [statistics.median(own) for own in zip(*newest, strict=True)]
        pairs = zip(usual, self._ratios(usual), strict=True)
        return float(max((own * (1 - 1 / ratio) for own, ratio in pairs if ratio > 0), default=0.0))

    def _ratios(self, seconds: Sequence[float]) -> list[float]:
        groups: dict[Hashable, list[float]] = defaultdict(list)
        for peers, own in zip(self._peers, seconds, strict=True):
            groups[peers].append(own)
        medians = {peers: statistics.median_low(each) for peers, each in groups.items()}
        pairs = zip(self._peers, seconds, strict=True)
        return [own / medians[peers] if medians[peers] > 0 else 1.0 for peers, own in pairs]

    def _spread(self) -> float:
        """Estimates robustly the relative variation of a rank's own time between reports."""
        pairs = (pair for before, after in pairwise(self._reports) for pair in zip(before, after, strict=True))
        steps = [abs(math.log(b / a)) for a, b in pairs if a > 0 and b > 0]
        return 1.4826 * statistics.median(steps) if steps else 0.0
