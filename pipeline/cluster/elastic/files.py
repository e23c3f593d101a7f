"""The state files of the agents: one small file per node, in a directory that all nodes share.

Each file has one writer, which replaces it about once a second. A reader takes a node for alive once it has seen the
node's count change, and for dead when the count has not changed for some time by the reader's own clock. So clocks need
not agree, and files of an earlier job do not count. The silence of others counts only while this node can write its own
file: on a full disk all fall silent, and none is dead. Every read opens the file anew, since NFS asks the server only
then (close-to-open consistency). The only directory that is listed is the guests'. A plan, which names every node, is a
file of its own, written once; the nodes' files refer to it by name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from foundation.directory import write_text

DEAD_S = 20.0
"""Seconds without a new count after which a node is dead."""
_KEPT_PLANS = 16
"""Number of plans kept in memory: nodes are at most a few plans apart."""


@dataclass(frozen=True)
class RanksPlan:
    """A plan of the leader, adopted by the others: which nodes run the ranks, since when and why.

    Attributes:
        version: number of the plan among those of a job.
        start: number of the start of the ranks, from 1; 0 before the first.
        members: nodes with ranks, in the order of the ranks.
        address: address of the first member.
        port: port of the rendezvous.
        reason: why the plan was made, for the log.
        outcome: exit code of the job; None until it is to end.
        growing: whether the ranks are to save and end to let more nodes take part.
        restarts: number of starts after a loss, since the newest checkpoint.
        step: step of the newest checkpoint when the plan was made.
        faults: node -> number of faults that began there.
        excluded: node -> why it gets no ranks any more.
        guests: node -> address, for nodes that came from other jobs.
        short: whether the job ends because it lacks nodes.
        checking: whether the members are to check each other before the next start.
        leader: node that made the plan.
    """

    version: int = 0
    start: int = 0
    members: tuple[str, ...] = ()
    address: str = ""
    port: int = 0
    reason: str = ""
    outcome: int | None = None
    growing: bool = False
    restarts: int = 0
    step: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    guests: Mapping[str, str] = field(default_factory=dict)
    short: bool = False
    checking: bool = False
    leader: str = ""


@dataclass(frozen=True)
class NodeState:
    """State of a node, as its agent reports it.

    Attributes:
        node: name of the node.
        count: heartbeat count, which grows while the agent lives.
        plan: newest plan that the agent knows.
        start: number of the start of its ranks; 0 without ranks.
        running: whether ranks of that start run.
        codes: rank -> exit code of the ranks that have ended, in the order in which they ended; negative for a signal.
        error: error of the first rank that failed; empty where no rank has failed.
        stop: whether the node was asked to stop the run.
        guest: whether it belongs to a job other than the run's own (`slurm/join.sbatch`).
        script: whether the batch script of the run's job is on this node.
        checked: version of the last plan whose checks this node has made.
        known: whether all nodes know the outcome and none need wait any more; set by the leader.
    """

    node: str
    count: int = 0
    plan: RanksPlan = field(default_factory=RanksPlan)
    start: int = 0
    running: bool = False
    codes: Mapping[int, int] = field(default_factory=dict)
    error: str = ""
    stop: bool = False
    guest: bool = False
    script: bool = False
    checked: int = 0
    known: bool = False


class StateFiles:
    """The state files of all nodes, as one node reads and writes them.

    Args:
        directory: directory on a file system that all nodes share; made if need be.
        node: name of this node.
        nodes: names of the nodes known at first, this one included, in the order in which they lead.
        dead_s: seconds of silence after which a node is dead.

    Attributes:
        failing: whether this node's file could not be written the last time.
    """

    def __init__(self, directory: Path, *, node: str, nodes: Sequence[str], dead_s: float = DEAD_S) -> None:
        self._directory, self._node, self.nodes, self._dead_s = directory, node, tuple(nodes), dead_s
        self._heard: dict[str, tuple[NodeState, float | None]] = {}
        self._looked: dict[str, float] = {}
        self.failing, self._failed_at, self._failed_s = False, 0.0, 0.0
        self._guests = directory / "guests"
        self._guests.mkdir(parents=True, exist_ok=True)
        self._plans = _PlanFiles(directory, self._node)

    def write(self, state: NodeState) -> None:
        """Replaces this node's file.

        Raises:
            OSError: the file cannot be written; the others' silence does not count until it can be written (`_now`).
        """
        try:
            self._replace(state)
        except OSError:
            self._failed_at, self.failing = self._now(), True
            raise
        if self.failing:
            self._failed_s, self.failing = time.monotonic() - self._failed_at, False

    def _now(self) -> float:
        """Reads this node's clock, which stops while its own file cannot be written."""
        return self._failed_at if self.failing else time.monotonic() - self._failed_s

    def _replace(self, state: NodeState) -> None:
        fields = asdict(replace(state, plan=RanksPlan())) | {"plan": self._plans.name_of(state.plan)}
        temporary = self._directory / f".{self._node}.new"
        temporary.write_text(json.dumps(fields))
        temporary.replace(self._file(self._node))

    def announce(self, address: str) -> None:
        """Announces this node, a guest, to the leader.

        Args:
            address: address at which the others reach this node.
        """
        write_text(self._guests / self._node, address)

    def announced(self) -> dict[str, str]:
        """Returns node -> address of all guests so far; NFS may show their directory as it was a minute ago."""
        names = sorted(path for path in self._guests.iterdir() if not path.name.startswith("."))
        return {path.name: path.read_text() for path in names}

    def add(self, nodes: Iterable[str]) -> None:
        """Adds nodes after the known ones."""
        self.nodes = tuple(dict.fromkeys([*self.nodes, *nodes]))

    def read(self, node: str) -> NodeState | None:
        """Returns a node's state; None for a node that is dead or has not been seen alive yet (see `unknown`).

        A file that cannot be read for the moment counts as unchanged: the node is dead only after `dead_s`.
        """
        self._looked.setdefault(node, self._now())
        before, since = self._heard.get(node, (None, None))
        try:
            state = _read(self._file(node), self._plans)
        except (OSError, ValueError):  # missing, or on a file system that fails for a moment
            if before is None:
                return None
            state = before
        if before is not None and state.count != before.count:
            since = self._now()
        self._heard[node] = state, since
        return state if since is not None and self._now() - since <= self._dead_s else None

    def unknown(self, node: str) -> bool:
        """Tells whether a node has been watched too briefly to know whether it is alive."""
        _, since = self._heard.get(node, (None, None))
        return since is None and self._now() - self._looked.get(node, self._now()) < self._dead_s / 2

    def leader(self) -> NodeState | None:
        """Returns the state of the first node that is alive or may be; None where this node leads."""
        for node in self.nodes[: self.nodes.index(self._node)]:
            state = self.read(node)
            if state is not None or self.unknown(node):
                return state or NodeState(node)
        return None

    def _file(self, node: str) -> Path:
        return self._directory / f"{node}.json"


def read_state(path: Path) -> NodeState:
    """Reads a node's state file, for programs other than agents.

    Raises:
        OSError, ValueError, KeyError, TypeError: the file is being replaced, or is not an agent's.
    """
    return _read(path, _PlanFiles(path.parent, ""))


class _PlanFiles:
    """Plans by name, one file each; each file is written once and read once."""

    def __init__(self, directory: Path, node: str) -> None:
        self._directory, self._prefix = directory / "plans", f"{node}-{secrets.token_hex(4)}"
        self._known, self._made = {"": RanksPlan()}, 0

    def name_of(self, plan: RanksPlan) -> str:
        """Returns the name of a plan; writes a plan that has no file yet to a new one."""
        for name, known in self._known.items():
            if known == plan:
                return name
        self._made += 1
        name = f"{plan.version}-{self._prefix}-{self._made}"
        self._directory.mkdir(exist_ok=True)
        write_text(self._path(name), json.dumps(asdict(plan)))
        return self._remember(name, plan)

    def plan(self, name: str) -> RanksPlan:
        """Returns the plan with this name."""
        if name not in self._known:
            found = json.loads(self._path(name).read_text())
            self._remember(name, RanksPlan(**{**found, "members": tuple(found["members"])}))
        return self._known[name]

    def _remember(self, name: str, plan: RanksPlan) -> str:
        while len(self._known) > _KEPT_PLANS:
            del self._known[next(each for each in self._known if each)]
        self._known[name] = plan
        return name

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"


def _read(path: Path, plans: _PlanFiles) -> NodeState:
    found = json.loads(path.read_text())
    codes = {int(rank): code for rank, code in found["codes"].items()}
    return replace(NodeState(**found), plan=plans.plan(found["plan"]), codes=codes)
