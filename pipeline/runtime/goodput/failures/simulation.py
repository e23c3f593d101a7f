"""Simulates a run under failures, event by event: failures, restarts, spares, repairs. No clock, no cluster.

Events are failures and repaired nodes. Between two events training is a known function of time: a month of thousands of
nodes takes about a millisecond. A failure during a restart begins the restart anew. A spare replaces a lost node.
Without a spare the run goes on with fewer nodes, proportionally slower, until nodes are repaired. It then restarts with
them after its next checkpoint, without time for detection.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import mean, stdev

from pipeline.runtime.goodput.failures.model import DAY, FailureModel, expected_goodput

_Z = 1.96
"""Standard errors on each side of a 95 % interval of a mean of many runs."""
_TIMES = ("detect_s", "requeue_s", "start_s", "load_s", "first_step_s", "save_blocking_s", "save_s")


@dataclass
class SimulatedTime:
    """Time of one simulated run by category, in seconds weighted by the share of nodes in use.

    Attributes:
        useful: seconds spent on steps that count.
        repeated: seconds spent on steps that a failure made the run repeat.
        saving: seconds in which training waited for checkpoints.
        restarting: seconds from failures, and from stops to take nodes back, to the next step.
        missing: seconds lost because nodes were missing.
    """

    useful: float = 0.0
    repeated: float = 0.0
    saving: float = 0.0
    restarting: float = 0.0
    missing: float = 0.0

    def shares(self) -> dict[str, float]:
        """Returns each category as a share of their sum."""
        parts = asdict(self)
        total = sum(parts.values())
        return {name: seconds / total for name, seconds in parts.items()}


@dataclass(frozen=True)
class Simulated:
    """Simulated runs of one model, each with its own random failures.

    Attributes:
        times: time of each run by category.
        failures: number of failures of each run.
    """

    times: tuple[SimulatedTime, ...]
    failures: tuple[int, ...]

    @property
    def goodputs(self) -> list[float]:
        """Useful share of each run's time, sorted."""
        return sorted(time.shares()["useful"] for time in self.times)

    @property
    def mean(self) -> float:
        """Mean goodput."""
        return mean(self.goodputs)

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % confidence interval of the mean."""
        return _Z * stdev(self.goodputs) / math.sqrt(len(self.times))

    def percentile(self, share: float) -> float:
        """Returns the goodput below which this share of the runs stays."""
        return self.goodputs[min(len(self.times) - 1, int(share * len(self.times)))]

    def time_shares(self) -> dict[str, float]:
        """Returns each category as a share of the time of all runs together."""
        rows = [asdict(time) for time in self.times]
        return SimulatedTime(**{name: sum(row[name] for row in rows) for name in rows[0]}).shares()


def simulate(model: FailureModel, *, seeds: Sequence[int]) -> Simulated:
    """Simulates one run per seed.

    Args:
        model: the inputs.
        seeds: two or more.
    """
    runs = [_Run(model, random.Random(seed)) for seed in seeds]
    return Simulated(tuple(run.run() for run in runs), tuple(run.failures for run in runs))


@dataclass
class _Run:
    """State of one run: the time, its nodes, and a heap of the times when nodes in repair return."""

    model: FailureModel
    random: random.Random
    now: float = 0.0
    nodes: int = field(init=False)
    spares: int = field(init=False)
    repairs: list[float] = field(default_factory=list)
    spent: SimulatedTime = field(default_factory=SimulatedTime)
    failures: int = 0

    def __post_init__(self) -> None:
        self.nodes, self.spares = self.model.nodes, self.model.spares

    def run(self) -> SimulatedTime:
        """Trains, fails and restarts until the days are over."""
        horizon = self.model.days * DAY
        while self.now < horizon:
            if self._train(horizon):
                self._restart(horizon, self.model.restart_s)
            elif self.now < horizon:  # nodes have returned
                self._restart(horizon, self.model.restart_s - self.model.detect_s)
        return self.spent

    def _train(self, horizon: float) -> bool:
        """Trains until a failure (True), until nodes have returned and a checkpoint is written, or to the end."""
        model, speed = self.model, self.nodes / self.model.nodes
        cycle = model.interval_s + model.save_blocking_s
        failure, end = self._until_failure(), horizon - self.now
        if self.nodes < model.nodes and self.repairs:  # the end of the save that follows the next repair
            back = max(0.0, self.repairs[0] - self.now)
            end = min(end, max(1, math.ceil(back / cycle)) * cycle + model.save_s)
        span, failed = min(failure, end), failure < end
        whole, rest = divmod(span, cycle)
        trained = whole * model.interval_s + min(rest, model.interval_s)
        kept = trained
        if failed:  # training up to the newest complete checkpoint
            kept = max(0.0, math.floor((span - model.save_s) / cycle)) * model.interval_s
        self.spent.useful += kept * speed
        self.spent.repeated += (trained - kept) * speed
        self.spent.saving += (span - trained) * speed
        self._pass(span, missing=1 - speed)
        if failed:
            self._fail()
        return failed

    def _restart(self, horizon: float, seconds: float) -> None:
        """Restarts the run; every failure meanwhile begins the restart anew, with detection."""
        while self.now < horizon:
            self._return_nodes()
            failure = self._until_failure()
            span = min(seconds, failure, horizon - self.now)
            self.spent.restarting += span * self.nodes / self.model.nodes
            self._pass(span, missing=1 - self.nodes / self.model.nodes)
            if failure >= seconds:
                return
            self._fail()
            seconds = self.model.restart_s

    def _until_failure(self) -> float:
        """Draws the seconds to the next failure of a node in use; failures are memoryless, so each event draws anew."""
        if not self.nodes:
            return math.inf
        return self.random.expovariate(1.0) * self.model.node_mtbf_s / self.nodes

    def _fail(self) -> None:
        """Fails a node, which is only restarted, or lost: a spare replaces it, or the run goes on without it."""
        self.failures += 1
        if self.random.random() >= self.model.node_loss_share:
            return
        heapq.heappush(self.repairs, self.now + self.model.repair_s)
        self._return_nodes()
        if self.spares:
            self.spares -= 1
        else:
            self.nodes -= 1

    def _return_nodes(self) -> None:
        """Returns repaired nodes to the run, or makes them spares."""
        while self.repairs and self.repairs[0] <= self.now:
            heapq.heappop(self.repairs)
            if self.nodes < self.model.nodes:
                self.nodes += 1
            else:
                self.spares += 1

    def _pass(self, seconds: float, *, missing: float) -> None:
        self.now += seconds
        self.spent.missing += seconds * missing


@dataclass(frozen=True)
class GoodputGain:
    """Gain of goodput from a change of one input.

    Attributes:
        change: change in words.
        value: value of the input before the change.
        simulated: gain of goodput in the simulation, a fraction.
        formula: gain of goodput by the closed formula, a fraction.
    """

    change: str
    value: float
    simulated: float
    formula: float


def sensitivity(model: FailureModel, *, seeds: Sequence[int]) -> list[GoodputGain]:
    """Computes the gains by half of each time, half or twice the interval, half the failures, twice the spares."""
    before, formula = simulate(model, seeds=seeds).mean, expected_goodput(model)

    def gain(change: str, value: float, other: FailureModel) -> GoodputGain:
        simulated = simulate(other, seeds=seeds).mean - before
        return GoodputGain(change, value, simulated, expected_goodput(other) - formula)

    halved: Callable[[str], FailureModel] = lambda name: replace(model, **{name: getattr(model, name) / 2})  # noqa: E731
    found = [gain(f"{name} / 2", getattr(model, name), halved(name)) for name in _TIMES if getattr(model, name)]
    if model.interval_s / 2 >= model.save_s:
        found.append(gain("interval_s / 2", model.interval_s, halved("interval_s")))
    found.append(gain("interval_s x 2", model.interval_s, replace(model, interval_s=2 * model.interval_s)))
    found.append(gain("node_mtbf_s x 2", model.node_mtbf_s, replace(model, node_mtbf_s=2 * model.node_mtbf_s)))
    found.append(gain("spares x 2", model.spares, replace(model, spares=2 * model.spares)))
    return sorted(found, key=lambda each: -each.simulated)
