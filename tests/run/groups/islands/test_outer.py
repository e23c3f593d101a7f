"""The outer optimizer of islands."""

from __future__ import annotations

import pytest
import torch

from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.schedule import Schedule
from pipeline.config.sections.groups import OuterSection
from pipeline.run.groups.islands.ledger import Deal
from pipeline.run.groups.islands.outer import OuterState, learning_rate_ratio


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
