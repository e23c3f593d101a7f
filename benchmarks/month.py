"""A month on 1,000 nodes with the agents' own decisions: failures as published, a clock that is simulated.

    python -m benchmarks.month

What decides is the code that runs on a cluster: `pipeline.cluster.elastic.leader` (who runs the ranks after a loss,
who is left out, when repaired nodes take part again, when the job ends) and `AutoInterval` (when to save). What is
simulated is what they look at: nodes that fall silent or whose rank is killed, checkpoints that count once they are
written, nodes that are repaired. Results: docs/reference/failure-simulation.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from statistics import mean, stdev

from headrace.base.errors import EXIT_LOST, EXIT_REQUEUE
from pipeline.cluster.elastic.files import NodeState, RanksPlan
from pipeline.cluster.elastic.leader import Terms, first_plan, grown, next_plan
from pipeline.cluster.elastic.verdict import CAUSE_S
from pipeline.run.checkpoint_interval import AutoInterval
from pipeline.runtime.goodput.failures.model import DAY, HOUR, LLAMA_NODE_MTBF_S, FailureModel

BUSY_NODE_MTBF_S = 2.8 * HOUR * 16384 / 8
"""One interruption in 2.8 h on 16,384 GPUs, 8 to a node."""
KILLED = 137
"""Exit code of a rank that was killed."""
SEEDS = 20


@dataclass
class Spent:
    """Seconds of a month, with all nodes in use.

    Attributes:
        useful: of steps that count.
        repeated: of steps that were lost.
        saving: in which training waited for checkpoints.
        restarting: from a failure, or for nodes that came back, to the next step.
        missing: of nodes that were not there.
        after: of the days after the job has ended.
    """

    useful: float = 0.0
    repeated: float = 0.0
    saving: float = 0.0
    restarting: float = 0.0
    missing: float = 0.0
    after: float = 0.0


@dataclass
class Month:
    """One run. Nodes of the job are `model.nodes` and `model.spares` more, of which the leader takes what it wants."""

    model: FailureModel
    seed: int
    least: int = 1
    now: float = 0.0
    spent: Spent = field(default_factory=Spent)
    starts: int = 0
    left_out: int = 0
    ended: str = ""
    _step: int = 0  # of the newest checkpoint that counts
    _repairs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        names = [f"node-{number:04}" for number in range(self.model.nodes + self.model.spares)]
        self._up: dict[str, None] = dict.fromkeys(names)  # in order, so that a seed is a run
        self._due = self._random.expovariate(len(names) / self.model.node_mtbf_s)
        self._members: tuple[int, frozenset[str]] = (0, frozenset())
        self._changes, self._looked = 0, (0, -1)
        self._interval = AutoInterval(node_mtbf_s=self.model.node_mtbf_s, nodes=self.model.nodes)
        self._terms = Terms(
            addresses={name: name for name in names},
            least=self.least,
            restarts=3,
            job=1,
            refusal=lambda count: "the mesh has no place for them" if count > self.model.nodes else None,
            step=lambda: self._step,
            wanted=self.model.nodes,
        )

    def run(self) -> Month:
        """Trains until the days are over, or the leader ends the job."""
        horizon = self.model.days * DAY
        plan = first_plan(self._terms, self._alive(RanksPlan()))
        while self.now < horizon and plan.outcome is None:
            self.starts += 1
            plan = self._restart(plan, horizon) or self._train(plan, horizon) or plan
        self.left_out, self.ended = len(plan.excluded), plan.reason if plan.outcome is not None else ""
        self.spent.after = max(0.0, horizon - self.now)
        return self

    def _restart(self, plan: RanksPlan, horizon: float) -> RanksPlan | None:
        """Starts the ranks of a plan; the next plan where another failure comes before their first step."""
        model = self.model
        end = min(self.now + model.requeue_s + model.start_s + model.load_s + model.first_step_s, horizon)
        failed = self._failure(plan, end)
        self._pass(plan, (end if failed is None else failed[0]) - self.now, "restarting")
        return None if failed is None else self._after(plan, failed[1])

    def _train(self, plan: RanksPlan, horizon: float) -> RanksPlan | None:
        """Trains and saves, until a failure, or until nodes that are there again make a larger start possible."""
        model, speed = self.model, self._speed(plan)
        uncounted, written = (
            0.0,
            (math.inf, 0.0),
        )  # work since the newest checkpoint that counts; (when, how much) of one
        while self.now < horizon:
            begun, block_s = self.now, model.save_blocking_s
            trains_until = min(
                begun + self._interval.period_s - block_s * (self._interval.decision is not None), horizon
            )
            failed = self._failure(plan, min(trains_until + block_s, horizon))
            end = min(trains_until + block_s, horizon) if failed is None else failed[0]
            trained = min(end, trains_until) - begun
            self._pass(plan, trained, "repeated")  # until a checkpoint of it counts
            self._pass(plan, end - begun - trained, "saving")
            uncounted += trained * speed
            counts = written[0] <= end
            if counts:
                uncounted -= written[1]
                self._count(written[1])
                written = (math.inf, 0.0)
            if failed is not None:
                return self._after(plan, failed[1])
            if math.isinf(written[0]):
                written = (end + model.save_s, uncounted)
            if counts and (larger := self._larger(plan)) is not None:
                self._count(uncounted)  # its ranks save and end
                return larger
        self._count(uncounted)
        return None

    def _count(self, work: float) -> None:
        """A checkpoint counts from now on."""
        self.spent.useful += work
        self.spent.repeated -= work
        self._step += 1
        self._interval.measured(blocking_s=self.model.save_blocking_s, save_s=self.model.save_s)

    def _larger(self, plan: RanksPlan) -> RanksPlan | None:
        """The start with nodes that are there again."""
        self._return_nodes()
        if self._looked == (plan.version, self._changes):
            return None  # the answer was no, and nothing has changed
        self._looked = plan.version, self._changes
        alive = self._alive(plan)
        made = grown(self._terms, plan, alive) if len(alive) > len(plan.members) else None
        if made is None:
            return None
        ended = {name: replace(state, running=False, codes={0: EXIT_REQUEUE}) for name, state in alive.items()}
        return next_plan(self._terms, made, ended, waited_s=math.inf)

    def _failure(self, plan: RanksPlan, until: float) -> tuple[float, str] | None:
        """When the next node with ranks fails, and which; None where none does until then. Spares fail unnoticed."""
        if self._members[0] != plan.version:
            self._members = plan.version, frozenset(plan.members)
        while self._due < until:
            at, node = self._due, self._random.choice(list(self._up))
            self._due = at + self._random.expovariate(len(self._up) / self.model.node_mtbf_s)
            if node in self._members[1]:
                return max(at, self.now), node
            self._lose(node, at)
        return None

    def _lose(self, node: str, at: float) -> None:
        del self._up[node]
        self._repairs[node] = at + self.model.repair_s
        self._changes += 1

    def _after(self, plan: RanksPlan, node: str) -> RanksPlan:
        """What the leader decides once the failure is seen: a node that is silent, or a rank that was killed."""
        lost = self._random.random() < self.model.node_loss_share
        if lost:
            self._lose(node, self.now)
        self._pass(plan, self.model.detect_s, "restarting")
        self._return_nodes()
        alive = self._alive(plan)
        if not lost:
            others = {name: replace(each, running=False, codes={0: EXIT_LOST}) for name, each in alive.items()}
            alive = {**others, node: replace(alive[node], running=False, codes={0: KILLED}, error="killed")}
        made = next_plan(self._terms, plan, alive, waited_s=CAUSE_S)
        assert made is not None  # a loss is always decided
        return made

    def _alive(self, plan: RanksPlan) -> dict[str, NodeState]:
        members = frozenset(plan.members)
        return {name: NodeState(name, plan=plan, start=plan.start, running=name in members) for name in self._up}

    def _return_nodes(self) -> None:
        for name in [name for name, at in self._repairs.items() if at <= self.now]:
            del self._repairs[name]
            self._up[name] = None
            self._changes += 1

    def _speed(self, plan: RanksPlan) -> float:
        return len(plan.members) / self.model.nodes

    def _pass(self, plan: RanksPlan, seconds: float, what: str) -> None:
        self.now += seconds
        setattr(self.spent, what, getattr(self.spent, what) + seconds * self._speed(plan))
        self.spent.missing += seconds * (1 - self._speed(plan))


def months(model: FailureModel, *, seeds: int = SEEDS) -> list[Month]:
    """A run per seed."""
    return [Month(model, seed).run() for seed in range(seeds)]


def goodput(month: Month) -> float:
    """Useful share of a month's time."""
    return month.spent.useful / (month.model.days * DAY)


def rows() -> Iterator[tuple[str, FailureModel]]:
    """What is simulated."""
    base = FailureModel(nodes=1000, spares=20, node_mtbf_s=BUSY_NODE_MTBF_S)
    yield "20 spares", base
    yield "the checkpoint read from memory (load 5 s)", replace(base, load_s=5.0)
    yield "5 spares", replace(base, spares=5)
    yield "no spare: goes on with fewer nodes", replace(base, spares=0)
    yield "a save that blocks for 30 s", replace(base, save_blocking_s=30.0)
    yield "Slurm's own detection and requeue (300 + 120 s)", replace(base, detect_s=300.0, requeue_s=120.0)
    yield "2,048 nodes, 41 spares", replace(base, nodes=2048, spares=41)
    yield "Llama 3's rate, 20 spares", replace(base, node_mtbf_s=LLAMA_NODE_MTBF_S)


def main() -> None:
    """Prints the table in Markdown."""
    names = [name for name in asdict(Spent()) if name != "after"]
    print(f"| run | goodput | {' | '.join(names[1:])} | starts | nodes left out |")
    print(f"|---|---|{'---|' * (len(names) + 1)}")
    for title, model in rows():
        found = months(model)
        shares = [goodput(each) for each in found]
        width = 1.96 * stdev(shares) / math.sqrt(len(shares))
        total = model.days * DAY
        parts = [f"{mean(getattr(each.spent, name) for each in found) / total:.2%}" for name in names[1:]]
        ended = sum(bool(each.ended) for each in found)
        starts, left_out = mean(each.starts for each in found), mean(each.left_out for each in found)
        note = f" ({ended} of {len(found)} ended early)" if ended else ""
        cells = [title + note, f"{mean(shares):.2%} +- {width:.2%}", *parts, f"{starts:.0f}", f"{left_out:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
