"""What becomes of a suspicious step: it is executed once more, and told apart, ignored, left out or gone back from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.base.errors import TrainingError
from pipeline.anomalies.guarded_step import GuardedStepper, Rollback
from pipeline.config.schema import AnomaliesSection
from pipeline.data.skips import NO_SKIPS
from pipeline.engines.base import StepOutcome
from pipeline.engines.objective import CrossEntropy, Loss
from pipeline.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from tests.engines.comparison import layout
from tests.engines.layout_worker import make_engine, resolved, step_batch

BAD, LAST, ALONE = 35, 38, layout(0, engine="torch", micro=8)
Factor = Callable[[int, int], float]
"""(step, how often it has been executed before) -> what its loss is multiplied by."""


class Scaled(CrossEntropy):
    """Cross-entropy times a factor that a test chooses."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.factor, self.step, self.times = factor, 0, dict[int, int]()

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        """As `CrossEntropy`."""
        before = self.times.get(self.step, 0)
        self.times[self.step] = before + 1
        loss = super().__call__(logits, labels, *extra_targets, vocabulary=vocabulary)
        return Loss(loss.total * self.factor(self.step, before), loss.parts)


class Run:
    """A small run of one process under `GuardedStepper`."""

    def __init__(self, factor: Factor, *, checkpoint: bool = True, keys: Any = None, **section: Any) -> None:
        self.run = resolved({**ALONE, **(keys or {})}, processes=1)
        self.objective, self.events = Scaled(factor), list[dict[str, Any]]()
        self.engine = make_engine(self.run, self.objective)
        self.steps = GuardedStepper(
            self.engine,
            AnomaliesSection(**section),
            fp16=self.run.config.fp16.enabled,
            samples=self.run.batch.samples,
            skips=NO_SKIPS,
            record=lambda step, **values: self.events.append({"step": step, **values}),
            may_go_back=lambda: checkpoint,
        )

    def to(self, last: int = LAST, *, first: int = 1) -> list[Any]:
        """Results of the steps."""
        results = []
        for step in range(first, last + 1):
            self.objective.step = step
            results.append(self.steps.train(step_batch(self.run, step), lr=1e-3))
        return results

    def weights(self) -> dict[str, Tensor]:
        """Of the engine."""
        return {name: weight.detach().clone() for name, weight in self.engine._masters.items()}


def well(_step: int, _before: int) -> float:
    return 1.0


def spiked(step: int, _before: int) -> float:
    return 50.0 if step == BAD else 1.0


def nan(step: int, _before: int) -> float:
    return float("nan") if step == BAD else 1.0


def flaky(step: int, before: int) -> float:
    return 50.0 if step == BAD and not before else 1.0


@pytest.fixture(scope="module")
def clean() -> tuple[list[Any], dict[str, Tensor]]:
    """Results and weights of a run in which nothing went wrong."""
    run = Run(well)
    return run.to(), run.weights()


def alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in others)


def test_a_run_in_which_nothing_goes_wrong_has_no_events_and_no_second_execution() -> None:
    run = Run(well)
    assert [result.outcome for result in run.to()] == [StepOutcome.APPLIED] * LAST
    assert not run.events
    assert set(run.objective.times.values()) == {1}


@pytest.mark.parametrize("wrong", [50.0, float("nan")])
def test_what_a_repetition_does_not_show_again_is_a_flaky_device_and_leaves_no_trace(
    clean: tuple[list[Any], dict[str, Tensor]], wrong: float
) -> None:
    run = Run(lambda step, before: wrong if step == BAD and not before else 1.0)
    results = run.to()
    assert [r.loss for r in results] == [r.loss for r in clean[0]]
    assert alike(run.weights(), clean[1])
    (event,) = run.events
    assert (event["event"], event["step"], event["action"]) == ("flaky", BAD, "apply")
    assert event["loss_again"] == clean[0][BAD - 1].loss
    assert event["loss"] != event["loss_again"]
    assert run.objective.times[BAD] == 2


def test_a_spike_is_ignored_by_default_but_reported_with_its_samples() -> None:
    run = Run(spiked)
    assert run.to()[BAD - 1].outcome is StepOutcome.APPLIED
    (event,) = run.events
    assert (event["event"], event["action"], event["reproduced"]) == ("spike", "ignore", True)
    assert (event["first_sample"], event["last_sample"]) == ((BAD - 1) * 8, BAD * 8 - 1)
    assert event["loss"] > event["threshold"] > event["median"]
    assert run.objective.times[BAD] == 2  # and not three


def test_a_spike_that_is_ignored_without_looking_again_is_executed_once() -> None:
    run = Run(spiked, recheck=False)
    assert run.to()[BAD - 1].outcome is StepOutcome.APPLIED
    assert run.objective.times[BAD] == 1
    assert run.events[0]["event"] == "spike"
    assert "reproduced" not in run.events[0]


@pytest.mark.parametrize("recheck", [True, False])
def test_a_spike_that_is_skipped_is_as_if_the_step_had_not_been(recheck: bool) -> None:
    run, without = Run(spiked, spikes="skip", recheck=recheck), Run(well)
    results = run.to()
    assert results[BAD - 1].outcome is StepOutcome.REFUSED
    expected = [*without.to(BAD - 1), *without.to(first=BAD + 1)]
    assert [r.loss for r in results if not r.skipped] == [r.loss for r in expected]
    assert alike(run.weights(), without.weights())
    assert [event["action"] for event in run.events] == ["skip"]


def test_a_loss_that_is_not_finite_stops_a_run_that_says_where_its_text_is() -> None:
    run = Run(nan)
    run.to(BAD - 1)
    before = run.weights()
    with pytest.raises(TrainingError, match=rf"step {BAD}: the loss is nan\n.*A repetition gave the same") as error:
        run.to(first=BAD)
    assert f"samples RUN --step {BAD}" in str(error.value)
    assert alike(run.weights(), before)
    (event,) = run.events
    assert (event["event"], event["action"], event["loss"]) == ("non_finite", "stop", None)


def test_a_loss_that_is_not_finite_can_be_skipped() -> None:
    run = Run(nan, non_finite="skip")
    assert run.to()[BAD - 1].outcome is StepOutcome.NON_FINITE
    assert run.steps.state()["streak"] == 0  # a good step came after it


def test_a_run_gives_up_after_so_many_bad_steps_without_progress() -> None:
    run = Run(lambda step, _: float("nan") if step >= BAD else 1.0, non_finite="skip", max_bad_steps=3)
    with pytest.raises(TrainingError, match=f"step {BAD + 2}: .*3 bad steps without progress"):
        run.to()
    assert [event["action"] for event in run.events] == ["skip", "skip", "stop"]


def test_an_order_to_go_back_carries_what_the_event_says() -> None:
    run = Run(spiked, spikes="rollback")
    with pytest.raises(Rollback) as order:
        run.to()
    assert order.value.step == BAD
    assert order.value.event(NO_SKIPS)["cause"] == "spike"
    assert order.value.event(NO_SKIPS)["first_sample"] == (BAD - 1) * 8
    assert not run.events  # its event belongs after the journal was cut


def test_going_back_again_and_again_without_getting_past_is_given_up() -> None:
    run = Run(spiked, spikes="rollback", max_bad_steps=2)
    with pytest.raises(Rollback) as order:
        run.to()
    run.steps.load(run.steps.state(), after=order.value)
    with pytest.raises(TrainingError, match="2 bad steps without progress"):
        run.to(first=BAD)


def test_with_no_checkpoint_to_go_back_to_the_step_is_skipped() -> None:
    run = Run(spiked, checkpoint=False, spikes="rollback")
    assert run.to()[BAD - 1].outcome is StepOutcome.REFUSED
    assert run.events[0]["action"] == "skip"


def test_fp16_does_not_notice_that_a_step_was_executed_twice() -> None:
    keys = {"fp16": {"enabled": True, "initial_scale_power": 10}}
    run, other = Run(flaky, keys=keys), Run(well, keys=keys)
    assert [r.loss for r in run.to()] == [r.loss for r in other.to()]
    assert torch.equal(run.engine._scaler.to_tensor(), other.engine._scaler.to_tensor())
    assert [event["event"] for event in run.events] == ["flaky"]


def test_fp16_overflows_are_no_anomalies() -> None:
    keys = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    run = Run(well, keys=keys)
    assert StepOutcome.OVERFLOW in [result.outcome for result in run.to()]
    assert not run.events


def test_a_run_that_goes_on_from_its_state_decides_as_one_that_was_not_stopped() -> None:
    whole, first = Run(spiked, spikes="skip"), Run(spiked, spikes="skip")
    expected = whole.to()
    first.to(20)
    second = Run(spiked, spikes="skip")
    second.engine = first.engine
    second.steps._engine = first.engine
    second.objective = first.objective
    second.steps.load(first.steps.state())
    results = second.to(first=21)
    assert [r.loss for r in results] == [r.loss for r in expected[20:]]
    assert second.events == whole.events
    assert second.steps.state() == whole.steps.state()
