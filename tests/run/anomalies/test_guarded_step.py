"""Handling of a step with an anomaly: recheck, then ignore, skip, rollback or stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.errors import TrainingError
from pipeline.config.sections.run import AnomaliesSection
from pipeline.data.micro_batch import IGNORE, StepBatch
from pipeline.data.skips import NO_SKIPS
from pipeline.engines.base import NO_UPDATE, StepOutcome
from pipeline.engines.objective import CrossEntropy, Loss
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard
from pipeline.run.anomalies.guarded_step import GuardedStepper, Rollback
from tests.engines.comparison import layout
from tests.engines.layout_worker import make_engine, resolved, step_batch

BAD, LAST, CASE = 35, 38, layout(0, engine="reference", micro=8)
Factor = Callable[[int, int], float]
"""(step, number of previous executions) -> factor of its loss."""


class Scaled(CrossEntropy):
    """Cross-entropy times a factor chosen by the test."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.factor, self.step, self.executions = factor, 0, dict[int, int]()

    def __call__(
        self, logits: Tensor, labels: Tensor, *extra_targets: Tensor, vocabulary: VocabularyShard = FULL_VOCABULARY
    ) -> Loss:
        executions = self.executions.get(self.step, 0)
        self.executions[self.step] = executions + 1
        loss = super().__call__(logits, labels, *extra_targets, vocabulary=vocabulary)
        return Loss(loss.total * self.factor(self.step, executions), loss.parts)


class Run:
    """A small run of one process under `GuardedStepper`."""

    def __init__(self, factor: Factor, *, checkpoint: bool = True, keys: Any = None, **section: Any) -> None:
        self.run = resolved({**CASE, **(keys or {})}, processes=1)
        self.objective, self.events = Scaled(factor), list[dict[str, Any]]()
        self.engine = make_engine(self.run, self.objective)
        self.stepper = GuardedStepper(
            self.engine,
            AnomaliesSection(**section),
            fp16=self.run.config.fp16.enabled,
            accounts=self.run.accounts,
            skips=NO_SKIPS,
            record=lambda step, **values: self.events.append({"step": step, **values}),
            can_roll_back=lambda: checkpoint,
        )

    def train(self, last: int = LAST, *, first: int = 1) -> list[Any]:
        results = []
        for step in range(first, last + 1):
            self.objective.step = step
            results.append(self.stepper.train(step_batch(self.run, step), lr=1e-3))
        return results

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.engine._masters.items()}


def healthy(_step: int, _executions: int) -> float:
    return 1.0


def spiked(step: int, _executions: int) -> float:
    return 50.0 if step == BAD else 1.0


def nan(step: int, _executions: int) -> float:
    return float("nan") if step == BAD else 1.0


def flaky(step: int, executions: int) -> float:
    return 50.0 if step == BAD and not executions else 1.0


@pytest.fixture(scope="module")
def clean() -> tuple[list[Any], dict[str, Tensor]]:
    run = Run(healthy)
    return run.train(), run.weights()


def same_weights(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in others)


def test_a_run_without_anomalies_has_no_events_and_no_recheck() -> None:
    run = Run(healthy)
    assert [result.outcome for result in run.train()] == [StepOutcome.APPLIED] * LAST
    assert not run.events
    assert set(run.objective.executions.values()) == {1}


@pytest.mark.parametrize("wrong", [50.0, float("nan")])
def test_an_anomaly_that_is_not_reproduced_is_flaky(clean: tuple[list[Any], dict[str, Tensor]], wrong: float) -> None:
    run = Run(lambda step, executions: wrong if step == BAD and not executions else 1.0)
    results = run.train()
    assert [r.loss for r in results] == [r.loss for r in clean[0]]
    assert same_weights(run.weights(), clean[1])
    (event,) = run.events
    assert (event["event"], event["step"], event["action"]) == ("flaky", BAD, "apply")
    assert event["loss_again"] == clean[0][BAD - 1].loss
    assert event["loss"] != event["loss_again"]
    assert run.objective.executions[BAD] == 2


def test_a_spike_is_ignored_by_default_but_reported_with_its_samples() -> None:
    run = Run(spiked)
    assert run.train()[BAD - 1].outcome is StepOutcome.APPLIED
    (event,) = run.events
    assert (event["event"], event["action"], event["reproduced"]) == ("spike", "ignore", True)
    assert (event["first_sample"], event["last_sample"]) == ((BAD - 1) * 8, BAD * 8 - 1)
    assert event["loss"] > event["threshold"] > event["median"]
    assert run.objective.executions[BAD] == 2  # and not three


def test_an_ignored_spike_is_executed_once_without_recheck() -> None:
    run = Run(spiked, recheck=False)
    assert run.train()[BAD - 1].outcome is StepOutcome.APPLIED
    assert run.objective.executions[BAD] == 1
    assert run.events[0]["event"] == "spike"
    assert "reproduced" not in run.events[0]


@pytest.mark.parametrize("recheck", [True, False])
def test_a_skipped_spike_leaves_the_same_weights_as_a_run_without_the_step(recheck: bool) -> None:
    run, without = Run(spiked, spikes="skip", recheck=recheck), Run(healthy)
    results = run.train()
    assert results[BAD - 1].outcome is StepOutcome.REFUSED
    expected = [*without.train(BAD - 1), *without.train(first=BAD + 1)]
    assert [r.loss for r in results if not r.skipped] == [r.loss for r in expected]
    assert same_weights(run.weights(), without.weights())
    assert [event["action"] for event in run.events] == ["skip"]


def test_a_non_finite_loss_stops_the_run_with_the_command_that_shows_its_samples() -> None:
    run = Run(nan)
    run.train(BAD - 1)
    before = run.weights()
    with pytest.raises(TrainingError, match=rf"step {BAD}: the loss is nan\n.*A recheck gave the same") as error:
        run.train(first=BAD)
    assert f"samples RUN --step {BAD}" in str(error.value)
    assert same_weights(run.weights(), before)
    (event,) = run.events
    assert (event["event"], event["action"], event["loss"]) == ("non_finite", "stop", None)


def test_a_non_finite_loss_can_be_skipped() -> None:
    run = Run(nan, non_finite="skip")
    assert run.train()[BAD - 1].outcome is StepOutcome.NON_FINITE
    assert run.stepper.state_dict()["streak"] == 0  # a good step came after it


def test_a_run_stops_after_give_up_after_bad_steps_without_progress() -> None:
    run = Run(lambda step, _: float("nan") if step >= BAD else 1.0, non_finite="skip", max_bad_steps=3)
    with pytest.raises(TrainingError, match=f"step {BAD + 2}: .*3 bad steps without progress"):
        run.train()
    assert [event["action"] for event in run.events] == ["skip", "skip", "stop"]


def test_a_rollback_carries_its_event() -> None:
    run = Run(spiked, spikes="rollback")
    with pytest.raises(Rollback) as rollback:
        run.train()
    assert rollback.value.step == BAD
    assert rollback.value.event(NO_SKIPS)["cause"] == "spike"
    assert rollback.value.event(NO_SKIPS)["first_sample"] == (BAD - 1) * 8
    assert not run.events  # its event is recorded after the journal is truncated


def test_repeated_rollbacks_at_the_same_step_stop_the_run() -> None:
    run = Run(spiked, spikes="rollback", max_bad_steps=2)
    with pytest.raises(Rollback) as rollback:
        run.train()
    run.stepper.load_state_dict(run.stepper.state_dict(), after=rollback.value)
    with pytest.raises(TrainingError, match="2 bad steps without progress"):
        run.train(first=BAD)


def test_without_a_checkpoint_for_a_rollback_the_step_is_skipped() -> None:
    run = Run(spiked, checkpoint=False, spikes="rollback")
    assert run.train()[BAD - 1].outcome is StepOutcome.REFUSED
    assert run.events[0]["action"] == "skip"


@pytest.mark.integration
def test_a_recheck_does_not_change_the_loss_scale_of_fp16() -> None:
    keys = {"fp16": {"enabled": True, "initial_scale_power": 10}}
    run, other = Run(flaky, keys=keys), Run(healthy, keys=keys)
    assert [r.loss for r in run.train()] == [r.loss for r in other.train()]
    assert torch.equal(run.engine._scaler.to_tensor(), other.engine._scaler.to_tensor())
    assert [event["event"] for event in run.events] == ["flaky"]


def test_fp16_overflows_are_not_anomalies() -> None:
    keys = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    run = Run(healthy, keys=keys)
    assert StepOutcome.OVERFLOW in [result.outcome for result in run.train()]
    assert not run.events


def test_a_resumed_run_takes_the_same_decisions_as_an_uninterrupted_one() -> None:
    whole, first = Run(spiked, spikes="skip"), Run(spiked, spikes="skip")
    expected = whole.train()
    first.train(20)
    second = Run(spiked, spikes="skip")
    second.engine = first.engine
    second.stepper._engine = first.engine
    second.objective = first.objective
    second.stepper.load_state_dict(first.stepper.state_dict())
    results = second.train(first=21)
    assert [r.loss for r in results] == [r.loss for r in expected[20:]]
    assert second.events == whole.events
    assert second.stepper.state_dict() == whole.stepper.state_dict()


def test_steps_without_targets_enter_no_statistic() -> None:
    runs = Run(healthy, spikes="skip", recheck=False), Run(healthy, spikes="skip", recheck=False)
    for run, empty in zip(runs, (range(0), range(1, 41)), strict=True):  # more than the spike detector waits for
        for step in empty:
            batch = step_batch(run.run, step)
            for micro in batch.micro_batches:
                micro.labels.fill_(IGNORE)
            result = run.stepper.train(StepBatch.of(step, batch.micro_batches, 0), lr=1e-3)
            assert math.isnan(result.loss)
            assert math.isnan(result.grad_norm)
            assert all(math.isnan(value) for value in result.parts.values())
    plain, masked = (run.stepper.state_dict() for run in runs)
    assert plain == masked  # no loss, no gradient norm, no streak
    after = [runs[1].stepper.train(step_batch(runs[1].run, step), lr=1e-3) for step in (41, 42)]
    assert [result.outcome for result in after] == [StepOutcome.APPLIED] * 2
    assert not runs[1].events


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_the_reference_draws_again_what_a_step_has_drawn(recomputed: str) -> None:
    keys = {"model": {"attention_dropout": 0.3}, "memory": {"activation_checkpointing": recomputed}}
    engine = Run(healthy, keys=keys).engine
    batches = [step_batch(resolved(CASE, processes=1), 1), step_batch(resolved(CASE, processes=1), 1)]
    first, second = (engine.train_step(each, lr=0.0, limits=NO_UPDATE) for each in batches)
    other = engine.train_step(replace(batches[0], step=2), lr=0.0, limits=NO_UPDATE)
    assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert other.loss != first.loss
    plain = Run(healthy, keys={**keys, "memory": {"activation_checkpointing": "none"}}).engine
    expected = plain.train_step(batches[0], lr=0.0, limits=NO_UPDATE)
    assert first.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)  # recomputation draws the same
