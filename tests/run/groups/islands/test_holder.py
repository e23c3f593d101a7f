"""The holder of asynchronous islands, called directly: updates, deals and returns; the outer optimizer of islands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.schedule import Schedule
from pipeline.config.sections.groups import IslandsSection, OuterSection
from pipeline.run.groups.islands.holder import SILENT_S, Holder, OuterShard
from pipeline.run.groups.islands.ledger import Deal, Ledger, Tail
from pipeline.run.groups.islands.outer import OuterState, learning_rate_ratio

STEPS, TOTAL = 4, 24


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Islands:
    """Islands of one rank that call a holder directly."""

    def __init__(self, **fields: Any) -> None:
        outer = {"lr": 0.5, "momentum": 0.0}
        section = {"count": 2, "steps": STEPS, "outer": outer, "start_s": 10, **fields}
        self.clock, self.ledgers = Clock(), dict[str, dict[str, Any]]()
        self.holder = Holder(IslandsSection.model_validate(section), clock=self.clock)

    def join(self, name: str, session: str = "1") -> dict[str, Any]:
        ledger = self.ledgers.get(name, Ledger().plain())
        answer = self.holder.join(name, session, layout="x", ranks=1, total=TOTAL, ledger=ledger)
        if answer["state"] == "upload":
            self.holder.upload(name, session, 0, OuterShard(torch.zeros(3), torch.zeros(3)))
            return self.join(name, session)
        return self._taken(name, answer)

    def commit(self, name: str, gradient: float, session: str = "1") -> dict[str, Any]:
        self.holder.push(name, session, 0, torch.full((3,), gradient))
        first = self.ledgers[name]["deal"]["first"]
        return self._taken(name, self.holder.commit(name, session, first))

    def weight(self, name: str) -> float:
        shard = self.holder.pull(name, "1", 0)
        return float(shard.weights[0])

    def _taken(self, name: str, answer: dict[str, Any]) -> dict[str, Any]:
        if "ledger" in answer:
            self.ledgers[name] = answer["ledger"]
        return answer

    def slots(self, name: str) -> list[int]:
        ledger = Ledger.from_plain(self.ledgers[name])
        return list(ledger.deal.slots(name))


def test_a_pseudo_gradient_counts_by_the_outer_updates_since_its_island_has_got_its_weights() -> None:
    islands = Islands()
    assert islands.join("a")["state"] == "wait"  # for the other of count
    islands.join("b")
    islands.join("a")
    assert islands.commit("b", 1.0)["committed"] == {"first": 0, "staleness": 0, "weight": 1.0}
    assert islands.commit("b", 1.0)["committed"]["staleness"] == 0
    # two updates since: lr 0.5 / 3
    assert islands.commit("a", 6.0)["committed"]["weight"] == pytest.approx(1 / 3)
    assert islands.weight("a") == pytest.approx(-0.5 - 0.5 - 0.5 * 6 / 3)


def test_one_island_alone_makes_the_nesterov_step_of_the_synchronous_mode() -> None:
    outer = {"lr": 0.7, "momentum": 0.9}
    islands = Islands(count=1, outer=outer)
    islands.join("a")
    state = {"weight/w": NamedShard((3,), start=0, values=torch.zeros(3))}
    reference = OuterState(state, OuterSection.model_validate(outer))
    for gradient in (1.0, -2.0, 0.5):
        reference.step(torch.full((3,), gradient))
        islands.commit("a", gradient)
    assert islands.weight("a") == pytest.approx(float(reference.weights[0]))


def test_islands_in_turn_with_momentum_add_up_to_the_nesterov_step_of_their_mean() -> None:
    """Two of one speed: each has missed one update of the other, counts half, and every second one has momentum."""
    outer = {"lr": 0.7, "momentum": 0.9}
    islands = Islands(outer=outer)
    islands.join("a")
    islands.join("b")
    islands.join("a")
    islands.commit("a", 0.0)
    islands.commit("b", 0.0)
    state = {"weight/w": NamedShard((3,), start=0, values=torch.zeros(3))}
    reference = OuterState(state, OuterSection.model_validate(outer))
    for first, second in ((1.0, 3.0), (2.0, -1.0)):
        islands.commit("a", first)
        islands.commit("b", second)
        reference.step(torch.full((3,), (first + second) / 2))
    assert islands.weight("b") == pytest.approx(float(reference.weights[0]))


def test_an_island_that_is_silent_loses_its_round_and_the_others_name_it() -> None:
    islands = Islands()
    islands.join("a")
    islands.join("b")
    islands.join("a")
    lost = islands.slots("a")
    islands.clock.now += SILENT_S / 2
    assert islands.commit("b", 1.0)["lost"] == []
    islands.clock.now += SILENT_S * 0.6
    assert islands.commit("b", 1.0)["lost"] == [["a", lost[0], lost[-1] + 1]]
    assert islands.commit("a", 1.0)["state"] == "rejoin"  # it was only paused: what it has trained is dropped
    assert islands.join("a")["state"] == "take"
    assert islands.slots("a")[0] > lost[-1]


def test_lost_slots_are_named_again_where_the_answer_that_named_them_has_not_arrived() -> None:
    islands = Islands()
    islands.join("a")
    islands.join("b")
    islands.join("a")
    lost = islands.slots("a")
    islands.holder.leave("a", "1")
    before, named = dict(islands.ledgers), [["a", lost[0], lost[-1] + 1]]
    assert islands.commit("b", 1.0)["lost"] == named
    islands.ledgers = before
    assert islands.join("b")["lost"] == named
    assert islands.commit("b", 1.0)["lost"] == []
    assert islands.join("a")["lost"] == []


def test_an_outer_update_that_takes_long_costs_no_island_its_round() -> None:
    """What islands send meanwhile waits for it."""
    islands = Islands()
    islands.join("a")
    islands.join("b")
    islands.join("a")
    update = islands.holder._update

    def slow(*args: Any) -> None:
        update(*args)
        islands.clock.now += 3 * SILENT_S

    islands.holder._update = slow  # type: ignore[method-assign]
    assert islands.commit("b", 1.0)["islands"] == ["a", "b"]
    islands.holder.beat("b", "1")
    assert islands.commit("a", 1.0)["lost"] == []
    islands.clock.now += 2 * SILENT_S  # a message of its own says that an island lives
    assert islands.commit("a", 1.0)["lost"] == [["b", 8, 12]]


def test_a_late_comer_takes_the_newest_weights_and_the_next_slots() -> None:
    islands = Islands(count=1)
    islands.join("a")
    islands.commit("a", 1.0)
    assert islands.join("b")["state"] == "take"
    assert (islands.weight("b"), islands.slots("a"), islands.slots("b")) == (-0.5, [4, 5, 6, 7], [8, 9, 10, 11])


def test_all_wait_in_the_end_for_the_rounds_that_are_open_and_take_the_same_weights() -> None:
    islands = Islands()
    islands.join("a")
    islands.join("b")
    islands.join("a")
    while islands.commit("b", 1.0)["state"] == "take":
        pass
    assert islands.join("b")["state"] == "wait"
    assert islands.commit("a", 1.0)["state"] == "end"
    assert islands.join("b")["state"] == "end"
    assert islands.weight("a") == islands.weight("b")


def test_a_holder_that_is_started_again_goes_on_with_the_newest_state_and_the_rounds_that_were_open() -> None:
    """Slots 0 to 3 of b are in a's weights: b, whose checkpoint is of before, may not train them again."""
    old = Islands()
    old.join("a")
    old.join("b")
    old.join("a")
    assert (old.slots("a"), old.slots("b")) == ([4, 5, 6, 7], [0, 1, 2, 3])
    before = dict(old.ledgers)
    old.commit("b", 1.0)  # b goes on with slots 8 to 11
    old.commit("a", 1.0)  # a with 12 to 15
    for of_b, state, lost in ((old.ledgers["b"], "keep", []), (before["b"], "take", [["b", 8, 12]])):
        new = Islands()
        new.ledgers = {"a": old.ledgers["a"], "b": of_b}
        new.join("a")
        answers = {"b": new.join("b"), "a": new.join("a")}
        assert (answers["a"]["state"], answers["b"]["state"]) == ("keep", "wait")
        answers["b"] = new.join("b")
        assert answers["b"]["state"] == state
        assert answers["b"].get("lost", []) == lost
        assert new.holder.version == 2
        assert new.slots("b") == ([8, 9, 10, 11] if state == "keep" else [16, 17, 18, 19])


def test_a_round_of_the_synchronous_mode_is_lost_with_a_name_for_each_of_its_islands() -> None:
    islands = Islands()
    deal, before = Deal(8, STEPS, ("a", "b"), 4), Deal(0, STEPS, ("a", "b"), 0)
    tails = (Tail("a", 3, 4), Tail("b", 7, 8))
    ledger = Ledger(1, "of rounds", deal, before, tails).plain()
    islands.ledgers = {"a": ledger, "b": ledger}
    answers = [islands.join(name) for name in ("a", "b", "a")]
    named = {tuple(each) for answer in answers for each in answer.get("lost", [])}
    assert named == {("a", 3, 4), ("b", 7, 8), ("a", 8, 12), ("b", 12, 16)}
    assert sorted(islands.slots("a") + islands.slots("b")) == list(range(16, TOTAL))


def test_a_run_with_another_layout_begins_afresh_at_a_holder_whose_islands_have_left() -> None:
    islands = Islands(count=1)
    islands.join("a")
    islands.commit("a", 1.0)
    fresh: dict[str, Any] = {"layout": "y", "ranks": 1, "total": TOTAL, "ledger": Ledger().plain()}
    assert islands.holder.join("b", "1", **fresh) == {"state": "refused", "islands": ["a"]}
    islands.holder.leave("a", "1")
    assert islands.holder.join("b", "1", **fresh)["state"] == "upload"
    islands.holder.upload("b", "1", 0, OuterShard(torch.full((7,), 5.0), torch.zeros(7)))
    deal = islands.holder.join("b", "1", **fresh)["ledger"]["deal"]
    assert (deal["first"], islands.weight("b")) == (0, 5.0)


def test_the_outer_step_is_that_of_sgd_with_nesterov_momentum() -> None:
    torch.manual_seed(0)
    weights = torch.randn(12)
    outer = OuterState({"weight/w": NamedShard((3, 4), start=0, values=weights)}, OuterSection())
    reference = torch.nn.Parameter(weights.clone())
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        gradient = torch.randn(12)
        reference.grad = gradient.clone()
        sgd.step()
        outer.step(gradient)
    torch.testing.assert_close(outer.weights, reference.data)


def test_a_momentum_that_follows_the_learning_rate_is_that_of_sgd_with_a_falling_one() -> None:
    """The pseudo-gradient of a round is the sum of its learning rates times a direction."""
    torch.manual_seed(0)
    schedule = Schedule("WSD", 4e-3, warmup=1, total=20, decay=19)
    weights, momentum = torch.randn(12), 0.9
    outer = OuterState({"weight/w": NamedShard((3, 4), start=0, values=weights)}, OuterSection(momentum=momentum))
    reference = torch.nn.Parameter(weights.clone())
    sgd = torch.optim.SGD([reference], lr=1.0, momentum=momentum, nesterov=True)
    for begin, end in ((0, 6), (6, 12), (12, 18), (18, 20)):
        deal, direction = Deal(0, end - begin, ("a",), begin), torch.randn(12)
        size = sum(schedule.lr(step) for step in range(begin + 1, end + 1))
        sgd.param_groups[0]["lr"] = 0.7 * size
        reference.grad = direction.clone()
        sgd.step()
        kept = learning_rate_ratio(schedule, deal, steps=6)
        assert kept == 1.0 if begin == 0 else kept < 1.0
        outer.step(direction * size, kept=kept)
    torch.testing.assert_close(outer.weights, reference.data)
    # a warm-up does not enlarge what came before it
    assert learning_rate_ratio(Schedule("WSD", 1.0, warmup=12, total=99), Deal(6, 6, ("a",), 6), steps=6) == 1.0


def test_with_overlap_the_ratio_is_that_of_the_steps_from_snapshot_to_snapshot() -> None:
    """Rounds of 6 steps, their last 2 beside the exchange; the last round has 3 and no tail."""
    schedule = Schedule("WSD", 1.0, warmup=1, total=24, decay=23)

    def rates(first: int, last: int) -> float:
        return sum(schedule.lr(step) for step in range(first, last + 1))

    third, last = Deal(0, 6, ("a",), 12, after=2), Deal(0, 3, ("a",), 18)
    assert learning_rate_ratio(schedule, third, steps=6, overlap=2) == pytest.approx(rates(11, 16) / rates(5, 10))
    assert learning_rate_ratio(schedule, last, steps=6, overlap=2) == pytest.approx(rates(17, 21) / rates(11, 16))
