"""What becomes of a run: the first cause decides, a bad node is left out, and only progress renews the restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from foundation.errors import EXIT_FOLLOWED, EXIT_LOST, EXIT_REQUEUE
from pipeline.cluster.elastic.files import NodeState, RanksPlan
from pipeline.cluster.elastic.leader import Terms, first_plan, grown, newest, next_plan, reconciled, welcomed
from pipeline.cluster.elastic.verdict import CAUSE_S, FOLLOWED_S, SAVED_S

NODES = ("a", "b", "c")


@dataclass
class World:
    """A job on three nodes; `step` is the newest checkpoint's, and the run has layouts for `sizes` nodes."""

    step: int = 0
    sizes: tuple[int, ...] = (1, 2, 3)
    least: int = 1
    restarts: int = 2

    @property
    def terms(self) -> Terms:
        addresses = {node: f"10.0.0.{number}" for number, node in enumerate(NODES, 1)}
        refusal = {n: None if n in self.sizes else f"no layout for {n}" for n in range(4)}
        return Terms(addresses, self.least, self.restarts, 7, refusal.__getitem__, lambda: self.step)

    def start(self) -> RanksPlan:
        return first_plan(self.terms, states())


def states(
    plan: RanksPlan | None = None,
    *,
    codes: Mapping[str, Mapping[int, int]] | None = None,
    running: tuple[str, ...] = NODES,
    without: str = "",
    errors: Mapping[str, str] | None = None,
    stop: bool = False,
) -> dict[str, NodeState]:
    """Nodes that have begun a plan."""
    plan, codes, errors = plan or RanksPlan(), codes or {}, errors or {}
    return {
        n: NodeState(n, 1, plan, plan.start, n in running, codes.get(n, {}), errors.get(n, ""), stop)
        for n in NODES
        if n not in without
    }


def decided(world: World, plan: RanksPlan, waited_s: float = CAUSE_S, **given: object) -> RanksPlan:
    made = next_plan(world.terms, plan, states(plan, **given), waited_s=waited_s)  # type: ignore[arg-type]
    assert made is not None
    assert made.version == plan.version + 1
    return made


def test_the_first_start_has_all_nodes_and_the_largest_layout_there_is() -> None:
    plan = World().start()
    assert (plan.start, plan.members, plan.address) == (1, NODES, "10.0.0.1")
    assert World(sizes=(1, 2)).start().members == ("a", "b")
    refused = World(sizes=()).start()
    assert (refused.outcome, refused.members) == (2, ())
    assert "no layout for 3" in refused.reason


def test_nothing_is_decided_while_the_ranks_run_or_have_not_begun() -> None:
    world = World()
    plan = world.start()
    assert next_plan(world.terms, plan, states(plan), waited_s=0) is None
    late = states(plan, codes={"a": {0: 0}}, running=("b",))
    late["c"] = NodeState("c")  # has not adopted the plan yet
    assert next_plan(world.terms, plan, late, waited_s=CAUSE_S) is None


@pytest.mark.parametrize(("codes", "outcome"), [((0, 0, 0), 0), ((75, 75, 0), 75), ((130, 130, 130), 130)])
def test_ranks_that_end_well_end_the_run(codes: tuple[int, ...], outcome: int) -> None:
    made = decided(World(), World().start(), codes={n: {k: codes[k]} for k, n in enumerate(NODES)}, running=())
    assert made.outcome == outcome


def test_a_rank_that_was_asked_to_stop_before_it_could_listen_has_stopped() -> None:
    codes = {"a": {0: -10}, "b": {1: 75}, "c": {2: 75}}
    assert decided(World(), World().start(), codes=codes, running=()).outcome == EXIT_REQUEUE


def test_ranks_that_wait_for_one_that_was_stopped_before_it_could_listen_are_not_waited_for() -> None:
    world, plan = World(), World().start()
    codes = {"b": {1: -10}}
    assert next_plan(world.terms, plan, states(plan, codes=codes), waited_s=CAUSE_S - 1) is None
    assert decided(world, plan, codes=codes).outcome == EXIT_REQUEUE


def test_a_dead_node_is_left_out_at_once_the_first_one_too() -> None:
    world = World()
    made = decided(world, world.start(), without="a", waited_s=0)
    assert (made.start, made.members, made.address, made.restarts) == (2, ("b", "c"), "10.0.0.2", 1)
    assert made.faults == {"a": 1}
    assert "a does not answer" in made.reason
    assert made.port != world.start().port


def test_nodes_that_do_not_answer_are_told_with_the_plan_whose_ranks_are_ended_and_lost_ranks_are_not() -> None:
    world, told = World(), list[tuple[RanksPlan, list[str]]]()
    plan = world.start()
    world.step = 10
    terms = replace(world.terms, note_silent=lambda plan, nodes: told.append((plan, [*nodes])))
    killed = states(plan, codes={"b": {1: -9}}, running=())
    assert next_plan(terms, plan, killed, waited_s=CAUSE_S) is not None
    assert told == []
    assert next_plan(terms, plan, states(plan, without="b"), waited_s=0) is not None
    assert told == [(replace(plan, step=10), ["b"])]


def test_a_killed_rank_is_the_cause_of_lost_links_and_all_start_again() -> None:
    world = World()
    codes = {"a": {0: EXIT_LOST}, "b": {1: -9}, "c": {2: EXIT_LOST}}
    errors = {"a": "rank 1 died", "b": "rank 1 on b was ended by SIGKILL"}
    made = decided(world, world.start(), codes=codes, running=(), errors=errors)
    assert (made.members, made.faults) == (NODES, {"b": 1})
    assert made.reason == "a rank was lost: rank 1 on b was ended by SIGKILL"


def test_the_cause_may_show_after_its_consequences() -> None:
    world = World()
    plan = world.start()
    followed = states(plan, codes={"a": {0: EXIT_FOLLOWED}}, running=("b", "c"))
    assert next_plan(world.terms, plan, followed, waited_s=FOLLOWED_S - 1) is None
    assert decided(world, plan, FOLLOWED_S, codes={"a": {0: EXIT_FOLLOWED}}, running=("b", "c")).faults == {}
    codes = {"a": {0: EXIT_FOLLOWED}, "b": {1: 1}, "c": {2: -9}}
    made = decided(world, plan, codes=codes, running=(), errors={"b": "rank 1 on b: no such file"})
    assert made.members == ("a", "c")
    assert "no such file" in made.excluded["b"]


def test_ranks_that_hang_when_others_have_finished_are_lost() -> None:
    world = World()
    plan = world.start()
    half = states(plan, codes={"a": {0: 0}}, running=("b", "c"))
    assert next_plan(world.terms, plan, half, waited_s=SAVED_S - 1) is None
    assert decided(world, plan, SAVED_S, codes={"a": {0: 0}}, running=("b", "c")).start == 2


def test_an_error_of_every_node_ends_the_run_with_its_code() -> None:
    codes = {"a": {0: 2}, "b": {1: 2}, "c": {2: 2}}
    made = decided(World(), World().start(), codes=codes, running=(), errors={"a": "error: run.dir"})
    assert (made.outcome, made.reason) == (2, "error: run.dir")


def test_an_error_that_moves_to_another_node_is_not_the_nodes() -> None:
    world = World()
    first = decided(world, world.start(), codes={"b": {1: 1}}, running=("a", "c"), errors={"b": "boom"})
    assert first.members == ("a", "c")
    assert decided(world, first, codes={"a": {0: 1}}, running=("c",), errors={"a": "boom"}).outcome == 1
    world.step = 10  # with progress in between, it may be another bad node
    later = decided(world, first, codes={"a": {0: 1}}, running=("c",), errors={"a": "boom"})
    assert (later.outcome, later.members) == (None, ("c",))


def test_a_node_where_faults_begin_again_and_again_gets_no_ranks() -> None:
    world = World(restarts=9)
    plan = world.start()
    for _ in range(World().terms.faults):
        plan = decided(world, plan, codes={"c": {2: -9}}, running=("a", "b"))
    assert plan.members == ("a", "b")
    assert plan.excluded == {"c": f"{World().terms.faults} faults began there"}


def test_restarts_end_without_progress_and_begin_anew_with_it() -> None:
    world = World(restarts=2)
    plan = world.start()
    for _ in range(2):
        plan = decided(world, plan, codes={"c": {2: EXIT_LOST}}, running=("a", "b"))
    assert plan.outcome is None
    ended = decided(world, plan, codes={"c": {2: EXIT_LOST}}, running=("a", "b"))
    assert (ended.outcome, "2 times without a new checkpoint" in ended.reason) == (EXIT_LOST, True)
    world.step = 10
    assert decided(world, plan, codes={"c": {2: EXIT_LOST}}, running=("a", "b")).restarts == 1


def test_too_few_nodes_end_the_run_so_that_it_can_be_queued_again() -> None:
    world = World(least=3)
    made = decided(world, world.start(), without="b")
    assert made.outcome == EXIT_REQUEUE
    assert "2 nodes are left, and 3 are needed" in made.reason
    without_layout = World(sizes=(3,))
    assert decided(without_layout, without_layout.start(), without="b").outcome == EXIT_REQUEUE


def test_a_node_that_comes_back_takes_part_from_the_next_checkpoint_on() -> None:
    world = World()
    plan = decided(world, world.start(), without="a")
    alive = {**states(plan), "a": NodeState("a", plan=plan)}
    assert grown(world.terms, plan, alive) is None  # no checkpoint since
    world.step = 20
    asked = grown(world.terms, plan, alive)
    assert (asked.start, asked.growing) == (plan.start, True)
    assert grown(world.terms, asked, alive) is None
    saved = {n: replace(each, running=False, codes={0: EXIT_REQUEUE}) for n, each in states(asked, without="a").items()}
    made = next_plan(world.terms, asked, {**saved, "a": NodeState("a")}, waited_s=0)
    assert (made.start, made.members, made.growing, made.step) == (3, NODES, False, 20)
    stopping = {n: replace(each, stop=True) for n, each in saved.items()}
    ended = next_plan(world.terms, asked, {**stopping, "a": NodeState("a")}, waited_s=0)
    assert ended.outcome == EXIT_REQUEUE


def test_no_room_is_made_where_more_nodes_have_no_layout() -> None:
    world = World(sizes=(2,))
    plan = decided(world, world.start(), without="a")
    world.step = 20
    assert grown(world.terms, plan, {**states(plan), "a": NodeState("a")}) is None


def test_a_loss_that_names_no_node_has_the_nodes_checked_and_the_bad_one_left_out() -> None:
    plan = World().start()
    found = {"b": "no other node can exchange data with it", "z": "no member"}
    noted: list[str] = []
    terms = replace(
        World().terms, checks=True, bad={2: found}.__getitem__, note_fault=lambda *fault: noted.append(": ".join(fault))
    )
    lost = states(plan, codes={n: {k: EXIT_LOST} for k, n in enumerate(NODES)}, running=())
    asked = next_plan(terms, plan, lost, waited_s=CAUSE_S)
    assert asked.checking
    assert asked.start == plan.start
    done = {n: replace(state, checked=asked.version) for n, state in lost.items()}
    assert next_plan(terms, asked, {**done, "b": lost["b"]}, waited_s=0) is None  # b is still at it
    made = next_plan(terms, asked, done, waited_s=0)
    assert not made.checking
    assert (made.start, made.members) == (2, ("a", "c"))
    assert made.excluded == {"b": "no other node can exchange data with it"}
    assert "bad node: b" in made.reason
    assert noted == ["b: no other node can exchange data with it"]


def test_the_nodes_that_came_are_checked_before_the_first_start_and_nobody_is_to_blame_for_coming_late() -> None:
    noted: list[str] = []
    terms = replace(
        World().terms,
        checks=True,
        bad={1: {"b": "clock"}}.__getitem__,
        left_out=lambda: {"z": "fans"},
        note_fault=lambda *fault: noted.append(": ".join(fault)),
    )
    alive = {n: state for n, state in states().items() if n != "c"}
    plan = first_plan(terms, alive)
    assert (plan.start, plan.checking, plan.members, plan.excluded) == (0, True, ("a", "b"), {"z": "fans"})
    assert next_plan(terms, plan, alive, waited_s=0) is None
    done = {n: replace(state, plan=plan, checked=plan.version) for n, state in alive.items()}
    made = next_plan(terms, plan, {**done, "c": NodeState("c")}, waited_s=0)
    assert (made.start, made.checking, made.members, made.restarts) == (1, False, ("a", "c"), 0)
    assert made.reason == "start; bad node: b"
    assert noted == ["b: clock"]
    stopped = next_plan(terms, plan, {**alive, "a": replace(alive["a"], stop=True)}, waited_s=0)
    assert (stopped.outcome, stopped.checking) == (EXIT_REQUEUE, False)


def test_a_single_node_is_not_checked() -> None:
    terms = replace(World().terms, checks=True)
    assert first_plan(terms, {"b": NodeState("b")}).start == 1


def test_a_rank_that_was_killed_needs_no_checks() -> None:
    plan, terms = World().start(), replace(World().terms, checks=True)
    codes = {"a": {0: EXIT_LOST}, "b": {1: -9}, "c": {2: EXIT_LOST}}
    made = next_plan(terms, plan, states(plan, codes=codes, running=()), waited_s=CAUSE_S)
    assert (made.start, made.checking) == (2, False)


def test_nodes_that_earlier_starts_have_left_out_get_no_ranks_and_faults_are_noted() -> None:
    noted: list[str] = []
    left = {"a": "clock", "c": "fans"}
    terms = replace(World().terms, left_out=lambda: left, note_fault=lambda node, _fault: noted.append(node))
    plan = first_plan(terms, states())
    assert plan.members == ("b",)
    assert next_plan(terms, plan, states(plan, codes={"b": {0: -9}}, running=()), waited_s=CAUSE_S) is not None
    assert noted == ["b"]


def test_a_job_that_has_fewer_nodes_than_it_should_waits_where_they_have_no_layout() -> None:
    terms = replace(World(sizes=(4,)).terms, wanted=4)
    plan = first_plan(terms, states())
    assert (plan.outcome, plan.short) == (EXIT_REQUEUE, True)


def test_a_guest_takes_part_from_the_next_checkpoint_on() -> None:
    world = World(sizes=(3, 4))
    plan = welcomed(world.start(), {"g": "10.0.0.9"})
    assert plan.reason == "g is there: it takes part from the next checkpoint on"
    assert welcomed(plan, {"g": "10.0.0.9"}) is None
    alive = {**states(plan), "g": NodeState("g", 1, plan, guest=True)}
    refusal = {n: None if n in (3, 4) else "no" for n in range(5)}.__getitem__
    assert grown(replace(world.terms, refusal=refusal), plan, alive) is None
    world.step = 20
    terms = replace(world.terms, refusal=refusal)
    growing = grown(terms, plan, alive)
    assert growing is not None
    codes = {n: replace(state, codes={k: 75}, running=False) for k, (n, state) in enumerate(states(growing).items())}
    made = next_plan(terms, growing, {**codes, "g": alive["g"]}, waited_s=0)
    assert made.members == (*NODES, "g")


def test_plans_that_several_leaders_made_at_once_give_way_to_one_start_of_all_nodes() -> None:
    """Each of three nodes took the others for dead, and began alone."""
    world = World(step=40)
    plan = world.start()
    alone = [
        replace(decided(world, plan, without="".join({*NODES} - {node})), leader=node, start=plan.start + 1 + number)
        for number, node in enumerate(NODES)
    ]
    assert len({each.version for each in alone}) == 1
    alive = {node: NodeState(node, 1, own, own.start, True) for node, own in zip(NODES, alone, strict=True)}
    for order in (alone, alone[::-1]):
        last, rivals = newest(order)
        assert (last, rivals) == (alone[2], NODES)
        made = reconciled(world.terms, last, alive, rivals)
        assert made.members == NODES
        assert made.version == last.version + 1
        assert made.start > max(each.start for each in alone)
        assert "a and b and c led at the same time" in made.reason
    assert newest([made, *alone]) == (made, ())
    assert newest([plan, plan, RanksPlan()]) == (plan, ())
