"""The leader's decisions: which nodes run the ranks next, or how the job ends. No processes, no clocks.

The plan holds all that a leader has to remember. Every node keeps it, and the next leader goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foundation.errors import EXIT_LOST, EXIT_REQUEUE, EXIT_USAGE
from pipeline.cluster.elastic.files import NodeState, RanksPlan
from pipeline.cluster.elastic.verdict import Verdict, verdict

_FIRST_PORT, _PORTS = 10000, 20000  # below 32768, where Linux's ephemeral ports begin


@dataclass(frozen=True)
class Terms:
    """Limits of the job, and callbacks that ask about the run or record its faults.

    Attributes:
        addresses: node -> address of the nodes of the job, in order.
        least: smallest number of nodes with which the run may go on.
        restarts: largest number of restarts after losses without a new checkpoint in between.
        job: a number that differs between jobs on one machine.
        refusal: returns why the run has no layout for a number of nodes; None when it has one.
        step: reads the step of the newest checkpoint.
        wanted: number of nodes that the run should have; with fewer nodes, it waits for more if there is no layout for
            their number.
        left_out: returns node -> why earlier starts have excluded it from this run.
        note_fault: records a node and the fault that began on it, for later starts.
        note_silent: records the plan of a start, with the step of the newest checkpoint, and its nodes that do not
            answer; called before the ranks on the other nodes are ended.
        faults: number of faults on a node after which it gets no ranks any more.
        checks: whether the nodes check each other before the first start, and after a loss that cannot be blamed on one
            of them.
        bad: takes the version of the plan that asked for checks; returns node -> its problems.
    """

    addresses: Mapping[str, str]
    least: int
    restarts: int
    job: int
    refusal: Callable[[int], str | None]
    step: Callable[[], int]
    wanted: int = 1
    left_out: Callable[[], Mapping[str, str]] = dict
    note_fault: Callable[[str, str], None] = lambda _node, _fault: None
    note_silent: Callable[[RanksPlan, Sequence[str]], None] = lambda _plan, _nodes: None
    faults: int = 3
    checks: bool = False
    bad: Callable[[int], Mapping[str, str]] = lambda _version: {}


def first_plan(terms: Terms, alive: Mapping[str, NodeState]) -> RanksPlan:
    """Makes the first plan: a start, or the checks before it.

    Args:
        terms: limits and callbacks of the job.
        alive: node -> state of the nodes that are alive.
    """
    plan = RanksPlan(step=terms.step(), excluded=dict(terms.left_out()))
    members = tuple(_ready(terms, plan, alive))
    if terms.checks and len(members) > 1:
        return _next(plan, members=members, checking=True, reason="start")
    return _start(terms, plan, alive, "start")


def next_plan(terms: Terms, plan: RanksPlan, alive: Mapping[str, NodeState], *, waited_s: float) -> RanksPlan | None:
    """Makes the next plan; None while there is nothing to decide.

    Args:
        terms: limits and callbacks of the job.
        plan: newest plan of all nodes: a start that has begun, or checks.
        alive: node -> state of the nodes that are alive, this one included.
        waited_s: seconds since the first exit of this start was seen.
    """
    if plan.checking:
        return _after_checks(terms, plan, alive)
    dead = [node for node in plan.members if node not in alive]
    if dead:
        made = _after_loss(terms, plan, alive, f"{', '.join(dead)} does not answer", begun=dead)
        terms.note_silent(replace(plan, step=made.step), dead)
        return made
    states = {node: alive[node] for node in plan.members}
    # a node that has not started its ranks yet has not ended them either
    current = {n: each if each.start == plan.start else NodeState(n, running=True) for n, each in states.items()}
    found = verdict(current, waited_s=waited_s)
    return None if found is None else _after_verdict(terms, plan, alive, found)


def _after_verdict(terms: Terms, plan: RanksPlan, alive: Mapping[str, NodeState], found: Verdict) -> RanksPlan:
    if found.kind == "stopped" and plan.growing and not any(state.stop for state in alive.values()):
        return _start(terms, replace(plan, step=terms.step(), restarts=0), alive, "more nodes are there")
    if found.kind in ("finished", "stopped"):
        return _next(plan, outcome=found.code, reason=found.kind)
    if found.kind == "failed":
        return _after_error(terms, plan, alive, found)
    if terms.checks and not found.nodes and len(plan.members) > 1:
        return _next(plan, checking=True, reason=f"a rank was lost: {found.text}")
    return _after_loss(terms, plan, alive, "a rank was lost", begun=found.nodes, text=found.text)


def _after_checks(terms: Terms, plan: RanksPlan, alive: Mapping[str, NodeState]) -> RanksPlan | None:
    """Plans a start without the nodes that the checks found bad, once all nodes have made the checks."""
    if any(state.stop for state in alive.values()) and plan.start == 0:
        return _next(plan, checking=False, outcome=EXIT_REQUEUE, reason="stopped before the start")
    if any(alive[node].checked < plan.version for node in plan.members if node in alive):
        return None
    bad = {node: why for node, why in terms.bad(plan.version).items() if node in plan.members}
    for node, what in bad.items():
        terms.note_fault(node, what)
    reason = f"{plan.reason}; bad node: {', '.join(sorted(bad))}" if bad else plan.reason
    left = replace(plan, checking=False, excluded={**plan.excluded, **bad})
    if plan.start == 0:
        return _start(terms, left, alive, reason)
    dead = [node for node in plan.members if node not in alive and node not in bad]
    return _after_loss(terms, left, alive, reason, begun=dead)


def newest(plans: Sequence[RanksPlan]) -> tuple[RanksPlan, tuple[str, ...]]:
    """Returns the newest plan of all nodes, and the leaders that made different plans of its version, if any.

    Two nodes that lead at once, each taking the other for dead, make different plans of one version. Every node then
    picks the plan of the leader whose name sorts last.
    """
    version = max(plan.version for plan in plans)
    last = sorted((plan for plan in plans if plan.version == version), key=lambda plan: (plan.leader, plan.start))
    rivals = tuple(dict.fromkeys(plan.leader for plan in last)) if any(plan != last[0] for plan in last) else ()
    return last[-1], rivals


def reconciled(terms: Terms, plan: RanksPlan, alive: Mapping[str, NodeState], rivals: Sequence[str]) -> RanksPlan:
    """Plans a start on all living nodes, which replaces plans that several leaders made at once.

    Args:
        terms: limits and callbacks of the job.
        plan: the plan among them that counts (`newest`).
        alive: node -> state of the nodes that are alive.
        rivals: nodes that made the different plans.
    """
    starts = max(state.plan.start for state in alive.values())
    why = f"{' and '.join(rivals)} led at the same time, and made different plans"
    return _start(terms, replace(plan, start=starts, checking=False, step=terms.step()), alive, why)


def welcomed(plan: RanksPlan, announced: Mapping[str, str]) -> RanksPlan | None:
    """Adds announced guests to the plan; None where the plan has them already.

    Args:
        plan: newest plan.
        announced: node -> address of all guests so far.
    """
    if plan.guests == announced:
        return None
    reason = f"{', '.join(sorted({*announced} - {*plan.guests}))} is there: it takes part from the next checkpoint on"
    return _next(plan, guests=dict(announced), reason=reason)


def grown(terms: Terms, plan: RanksPlan, alive: Mapping[str, NodeState]) -> RanksPlan | None:
    """Plans to stop the ranks so that idle nodes can join; None without such nodes, or without a newer checkpoint."""
    ready = _ready(terms, plan, alive)
    if plan.growing or len(ready) <= len(plan.members) or terms.step() <= plan.step:
        return None
    if any(terms.refusal(count) is None for count in range(len(ready), len(plan.members), -1)):
        return _next(plan, growing=True, reason="more nodes are there: the ranks save and start again")
    return None


def _after_error(terms: Terms, plan: RanksPlan, alive: Mapping[str, NodeState], found: Verdict) -> RanksPlan:
    """Restarts without the one node that had an error, at most once per checkpoint; otherwise ends the job."""
    step = terms.step()
    suspected = step <= plan.step and any(why.startswith("error") for why in plan.excluded.values())
    ends = _next(plan, outcome=found.code, reason=found.text or f"exit code {found.code}")
    if len(found.nodes) != 1 or len(plan.members) == 1 or suspected:
        return ends
    [bad] = found.nodes
    terms.note_fault(bad, found.text)
    plan = replace(plan, excluded={**plan.excluded, bad: f"error: {found.text}"}, step=step)
    made = _start(terms, plan, alive, f"without {bad}: {found.text}")
    return made if made.outcome is None else ends


def _after_loss(
    terms: Terms, plan: RanksPlan, alive: Mapping[str, NodeState], why: str, *, begun: Sequence[str], text: str = ""
) -> RanksPlan:
    step = terms.step()
    restarts = 1 if step > plan.step else plan.restarts + 1
    faults, excluded = dict(plan.faults), dict(plan.excluded)
    for node in begun:
        terms.note_fault(node, f"{why}: {text}" if text else why)
        faults[node] = faults.get(node, 0) + 1
        if faults[node] >= terms.faults and len(_ready(terms, plan, alive)) > terms.least:
            excluded[node] = f"{faults[node]} faults began there"
    reason = f"{why}: {text}" if text else why
    plan = replace(plan, restarts=restarts, step=step, faults=faults, excluded=excluded)
    if restarts > terms.restarts:
        why = f"{reason}; started again {terms.restarts} times without a new checkpoint: look for the cause"
        return _next(plan, outcome=EXIT_LOST, reason=why)
    return _start(terms, plan, alive, reason)


def _start(terms: Terms, plan: RanksPlan, alive: Mapping[str, NodeState], reason: str) -> RanksPlan:
    """Plans a start on as many nodes as have a layout; the others are spares."""
    ready, refusals = _ready(terms, plan, alive), []
    for count in range(len(ready), max(terms.least, 1) - 1, -1):
        refusal = terms.refusal(count)
        if refusal is None:
            members, start = tuple(ready[:count]), plan.start + 1
            port = _FIRST_PORT + (terms.job * 17 + start) % _PORTS
            where = {"members": members, "address": _addresses(terms, plan)[members[0]], "port": port}
            return _next(plan, start=start, reason=reason, growing=False, **where)
        refusals.append(refusal)
    why = refusals[0] if refusals else f"{len(ready)} nodes are left, and {terms.least} are needed"
    waits = plan.start > 0 or len(ready) < terms.wanted
    return _next(plan, outcome=EXIT_REQUEUE if waits else EXIT_USAGE, short=waits, reason=f"{reason}; {why}")


def _ready(terms: Terms, plan: RanksPlan, alive: Mapping[str, NodeState]) -> list[str]:
    return [node for node in _addresses(terms, plan) if node in alive and node not in plan.excluded]


def _addresses(terms: Terms, plan: RanksPlan) -> dict[str, str]:
    return {**terms.addresses, **plan.guests}


def _next(plan: RanksPlan, **fields: Any) -> RanksPlan:
    return replace(plan, version=plan.version + 1, **fields)
