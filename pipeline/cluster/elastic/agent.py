"""One node's agent: keeps its file fresh, follows the leader's plans, and leads where no node before it is alive."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foundation.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from pipeline.cluster.elastic.files import NodeState, RanksPlan, StateFiles
from pipeline.cluster.elastic.leader import Terms, first_plan, grown, newest, next_plan, reconciled, welcomed
from pipeline.cluster.elastic.local_ranks import Command, LocalRanks
from pipeline.cluster.elastic.slurm_requeue import SlurmJob
from pipeline.cluster.elastic.warm_ranks import WarmRanks

_POLL_S, _BEAT_S, _GROW_S = 0.25, 1.0, 10.0
_PER_NODE_S = 0.002
"""Seconds per node between two reads of all files, and between two writes of each: all share the file system."""
_LINGER_S = 15.0
"""Seconds that an agent waits at the end for the others to read the outcome."""
_WARM_S = 30.0
"""Seconds after a start in which the ranks have the host to themselves, for their own imports."""
_ALONE_S = 60.0
"""Seconds without any node of the run's own job after which a guest leaves."""


@dataclass
class Agent:
    """One node's agent, which runs until the job ends. One thread: a node whose file system hangs counts as dead.

    Args:
        node: name of this node.
        command: the command that each rank runs.
        terms: limits and callbacks of the job.
        files: state files of all nodes.
        join_s: seconds to wait for all nodes; the run then starts with the nodes that have come.
        say: prints a line of the leader for people.
        slurm: the batch system; None where something else has started the agents.
        guest: whether this node belongs to a job other than the run's own.
        script: whether the job's batch script is on this node.
        warm: waiting processes that have done a rank's imports; None without them.
        check_nodes: checks this node together with others; gets node -> address and the version of the plan that asks
            for the checks. It has to call `tick` meanwhile.
    """

    node: str
    command: Command
    terms: Terms
    files: StateFiles
    join_s: float
    say: Callable[[str], None]
    slurm: SlurmJob | None = None
    guest: bool = False
    script: bool = False
    warm: WarmRanks | None = None
    check_nodes: Callable[[Mapping[str, str], int], None] | None = None
    _state: NodeState = field(init=False)
    _ranks: LocalRanks | None = None
    _stop: signal.Signals | None = None
    _exit_seen: tuple[int, float] = (0, 0.0)
    _written: float = 0.0
    _looked: float = 0.0
    _led: float = -math.inf
    _started: float = 0.0
    _decided: bool = False
    _terminated: bool = False

    def __post_init__(self) -> None:
        self._state, self._began = NodeState(self.node, guest=self.guest, script=self.script), time.monotonic()
        self._host_seen, self._alive_at_end = self._began, {self.node: self._state}

    def run(self) -> RanksPlan:
        """Follows plans or leads until the job has an outcome; returns the last plan."""
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stopped)
        try:
            while self._state.plan.outcome is None:
                self.tick()
                self._look()
                time.sleep(_POLL_S)
            self._wait_for_readers()
        finally:
            if self._ranks is not None:
                self._ranks.end(tick=self.tick)
            if self.warm is not None:
                self.warm.end()
        if self.slurm is not None and self._decided:
            self._end_job(self.slurm)
        return self._state.plan

    def tick(self) -> None:
        """Keeps this node's file fresh; call it at least every few seconds."""
        if time.monotonic() - self._written >= max(_BEAT_S, _PER_NODE_S * len(self.files.nodes)):
            self._change()

    def stop(self) -> None:
        """Asks all nodes to save and to end."""
        self._stop = signal.SIGUSR1

    def _look(self) -> None:
        self._report()
        if self.guest and self._left_alone():
            self._adopt(replace(self._state.plan, outcome=EXIT_REQUEUE, reason="no node of the run's job is left"))
            return
        leader = self.files.leader()
        if leader is None and time.monotonic() - self._led < _PER_NODE_S * len(self.files.nodes):
            return
        plan = self._lead() if leader is None else leader.plan
        if plan is not None and plan.version > self._state.plan.version:
            self._adopt(plan)

    def _report(self) -> None:
        """Records the ranks' exits in this node's state."""
        ranks = self._ranks
        if self.warm is not None and ranks is not None and time.monotonic() - self._started > _WARM_S:
            self.warm.prepare()
        if ranks is not None and (ranks.codes() != self._state.codes or ranks.running != self._state.running):
            self._change(codes=ranks.codes(), running=ranks.running, error=self._state.error or ranks.error())

    def _lead(self) -> RanksPlan | None:
        others = {}
        for node in self.files.nodes:
            if node != self.node:
                others[node] = self.files.read(node)
                self.tick()  # reading a thousand files takes seconds
        self._led = time.monotonic()
        if any(map(self.files.unknown, others)):
            return None  # this node has just begun to lead, and has not watched all others long enough
        alive = {self.node: self._state, **{node: state for node, state in others.items() if state is not None}}
        plan, rivals = newest([state.plan for state in alive.values()])
        if plan.version > self._state.plan.version or self.files.failing:
            return plan  # another leader's plan, or this node cannot write and its decision would stay unread
        if rivals:
            made: RanksPlan | None = reconciled(self.terms, plan, alive, rivals)
        else:
            made = self._first(alive) if plan.version == 0 else self._next(plan, alive)
        if made is not None:
            made = replace(self._stopped_by_hand(made), leader=self.node)
            self._tell(made, alive)
            self._decided, self._alive_at_end = made.outcome is not None, alive
            if self._decided and self.slurm is not None:
                self.slurm.note(made)
        return made

    def _first(self, alive: Mapping[str, NodeState]) -> RanksPlan | None:
        if any(state.stop for state in alive.values()):
            return RanksPlan(version=1, outcome=EXIT_REQUEUE, reason="stopped before the start")
        missing = [node for node in self.files.nodes if node not in alive]
        if missing and time.monotonic() - self._began < self.join_s:
            return None
        if missing:
            self.say(f"{', '.join(missing)} did not come within {self.join_s:g} s")
        return first_plan(self.terms, alive)

    def _next(self, plan: RanksPlan, alive: Mapping[str, NodeState]) -> RanksPlan | None:
        made = next_plan(self.terms, plan, alive, waited_s=self._waited(plan, alive))
        if made is None and not plan.growing and not plan.checking and time.monotonic() - self._looked > _GROW_S:
            self._looked = time.monotonic()
            made = welcomed(plan, self.files.announced())
            if made is None and len(alive) > len(plan.members):
                made = grown(self.terms, plan, alive)
            if self.slurm is not None and not self._terminated:
                self._ask_for_nodes(self.slurm, plan, alive)
        return made

    def _ask_for_nodes(self, slurm: SlurmJob, plan: RanksPlan, alive: Mapping[str, NodeState]) -> None:
        usable = [node for node in alive if node not in plan.excluded]
        guests = sum(alive[node].guest for node in alive)
        slurm.ask_for(self.terms.wanted - len(usable), guests=guests, excluded=[*plan.excluded, *usable], say=self.say)

    def _waited(self, plan: RanksPlan, alive: Mapping[str, NodeState]) -> float:
        """Returns the seconds since this node first saw an exit of a start."""
        if not any(alive[node].codes for node in plan.members if node in alive and alive[node].start == plan.start):
            return 0.0
        if self._exit_seen[0] != plan.start:
            self._exit_seen = plan.start, time.monotonic()
        return time.monotonic() - self._exit_seen[1]

    def _tell(self, plan: RanksPlan, alive: Mapping[str, NodeState]) -> None:
        if plan.outcome is not None:
            self.say(f"the run ends with code {plan.outcome}: {plan.reason}")
        elif plan.checking:
            self.say(f"the nodes are checked ({plan.reason})")
        elif plan.start == self._state.plan.start:
            self.say(plan.reason)
        else:
            spares = [node for node in alive if node not in plan.members and node not in plan.excluded]
            rest = f"; spare: {', '.join(spares)}" if spares else ""
            left = "".join(f"; left out: {node} ({why})" for node, why in plan.excluded.items())
            self.say(f"start {plan.start} on {', '.join(plan.members)}{rest}{left} ({plan.reason})")

    def _left_alone(self) -> bool:
        """Tells whether no node of the run's own job has been alive for some time."""
        states = (self.files.read(node) for node in self.files.nodes if node != self.node)
        if any(state is not None and not state.guest for state in states):
            self._host_seen = time.monotonic()
        return time.monotonic() - self._host_seen > _ALONE_S

    def _stopped_by_hand(self, made: RanksPlan) -> RanksPlan:
        """Ends the job after a SIGTERM that Slurm did not send: its sender wants no restart."""
        slurm = self.slurm if self._terminated and made.outcome == EXIT_REQUEUE else None
        if slurm is None or slurm.after_sigterm() != "runs":
            return made
        return replace(made, outcome=EXIT_INTERRUPTED, reason=f"{made.reason} by SIGTERM: submit it again to go on")

    def _end_job(self, slurm: SlurmJob) -> None:
        if self._terminated and slurm.after_sigterm() == "ends":
            slurm.withdraw()
            return
        plan, alive = self._state.plan, self._alive_at_end
        nodes = [node for node, state in alive.items() if node not in plan.excluded and not state.guest]
        script = any(state.script for state in alive.values())
        slurm.end(plan, step=self.terms.step(), nodes=len(nodes), script_lives=script, say=self.say)

    def _adopt(self, plan: RanksPlan) -> None:
        self.files.add(plan.guests)
        starts = plan.start > self._state.plan.start
        if (starts or plan.checking) and self._ranks is not None:
            self._change(plan=plan)  # the other nodes end their ranks at the same time
            self._ranks.end(tick=self.tick)
            self._ranks = None
        self._change(plan=plan)
        if plan.checking:
            if self.check_nodes is not None and self.node in plan.members:
                addresses = {**self.terms.addresses, **plan.guests}
                self.check_nodes({node: addresses[node] for node in plan.members}, plan.version)
            self._change(checked=plan.version)
        if starts and plan.outcome is None and self.node in plan.members:
            self._ranks = LocalRanks(self.command, plan, self.node, None if self.warm is None else self.warm.take)
            self._ranks.start()
            self._started = time.monotonic()
            self._change(start=plan.start, running=True, codes={}, error="")
        if self._ranks is not None and (plan.growing or self._stop is not None):
            self._ranks.send(self._stop or signal.SIGUSR1)

    def _wait_for_readers(self) -> None:
        """Keeps this node's file until all nodes know the outcome: leader and followers read each other's files."""
        deadline, untold = time.monotonic() + _LINGER_S, [node for node in self.files.nodes if node != self.node]
        while time.monotonic() < deadline:
            self.tick()
            leader = self.files.leader()
            if leader is not None and leader.known:
                return
            if leader is None:
                untold = [node for node in untold if self._is_untold(node)]
                if not untold:
                    self._change(known=True)
                    return
            time.sleep(max(_POLL_S, _PER_NODE_S * len(untold)))

    def _is_untold(self, node: str) -> bool:
        self.tick()
        state = self.files.read(node)
        return state is not None and state.plan.outcome is None

    def _stopped(self, number: int, _frame: object) -> None:
        """Forwards a request to stop to the ranks; a batch system's SIGTERM gives them time to save, too."""
        self._stop = signal.SIGINT if number == signal.SIGINT else signal.SIGUSR1
        self._terminated |= number == signal.SIGTERM
        if self._ranks is not None:
            self._ranks.send(self._stop)

    def _change(self, **fields: Any) -> None:
        count, self._written = self._state.count + 1, time.monotonic()
        self._state = replace(self._state, count=count, stop=self._stop is not None, **fields)
        failing = self.files.failing
        try:
            self.files.write(self._state)
        except OSError as error:  # a full disk or a brief failure of the file system: the next tick writes again
            if not failing:
                self.say(f"{self.node} cannot write its heartbeat ({error}): it takes no node for dead until it can")
