"""A device that works one step ahead of the host decides, reports and ends as one that is waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.errors import TrainingError
from pipeline.engines.base import StepOutcome, UpdateLimits
from pipeline.engines.torch_native.deferred_step import DeferredStep, decide
from pipeline.run.anomalies.guarded_step import Rollback
from tests.engines.comparison import layout
from tests.engines.layout_worker import step_batch
from tests.run.anomalies.test_guarded_step import BAD, LAST, Factor, Run, flaky, healthy, nan, same_weights, spiked

SINGLE = layout(0, engine="torch", micro=4, bf16={"enabled": True}, gradient_clipping=0.5)


class Ahead(Run):
    """A run whose steps are begun before the step before is finished, where `ahead`."""

    def __init__(self, factor: Factor, *, ahead: bool, **section: Any) -> None:
        super().__init__(factor, keys=SINGLE, **section)
        self.engine.deferred = ahead
        self.begun: list[int] = []
        begin = self.engine.begin_step

        def begin_step(step: Any, **keys: Any) -> Any:
            self.objective.step = step.step  # a recheck executes a step after the next one has begun
            self.begun.append(step.step)
            return begin(step, **keys)

        self.engine.begin_step = begin_step

    def run_ahead(self, *, drained: int = 0) -> list[Any]:
        """All steps; the results in order. After step `drained` all that was begun is finished."""
        found = []
        for step in range(1, LAST + 1):
            self.stepper.begin(step_batch(self.run, step), lr=1e-3)
            found += self.stepper.finished(drain=step == drained)
        found += self.stepper.finished(drain=True)
        assert [step for step, _ in found] == list(range(1, LAST + 1))
        return [result for _, result in found]

    def masters(self) -> dict[str, Tensor]:
        return {name: master.values().clone() for name, master in self.engine._masters.items()}


CASES: dict[str, tuple[Factor, dict[str, Any]]] = {
    "healthy": (healthy, {}),
    "a spike, ignored": (spiked, {}),
    "a spike, ignored, not rechecked": (spiked, {"recheck": False}),
    "a spike, skipped": (spiked, {"spikes": "skip"}),
    "a spike, skipped, not rechecked": (spiked, {"spikes": "skip", "recheck": False}),
    "a flaky device": (flaky, {}),
    "NaN, skipped": (nan, {"non_finite": "skip"}),
    "two in a row": (lambda step, _: 50.0 if step in (BAD, BAD + 1) else 1.0, {"spikes": "skip", "max_bad_steps": 5}),
}


SWEPT = {"a spike, ignored, not rechecked", "a spike, skipped, not rechecked", "a flaky device"}


@pytest.mark.parametrize(
    ("name", "drained"),
    [
        *(pytest.param(name, 0, marks=[pytest.mark.sweep] * (name in SWEPT)) for name in CASES),
        pytest.param("a spike, skipped", BAD - 1, marks=pytest.mark.sweep),
        ("a spike, skipped", BAD),
    ],
)
def test_results_events_and_weights_are_those_of_steps_that_are_waited_for(name: str, drained: int) -> None:
    factor, section = CASES[name]
    ahead, waiting = Ahead(factor, ahead=True, **section), Ahead(factor, ahead=False, **section)
    found, expected = ahead.run_ahead(drained=drained), waiting.run_ahead()
    assert repr(found) == repr(expected)  # NaN is not equal to itself
    assert ahead.events == waiting.events
    assert same_weights(ahead.masters(), waiting.masters())
    assert ahead.stepper.state_dict() == waiting.stepper.state_dict()
    vetoed = {"healthy": 0, "a spike, ignored, not rechecked": 0, "two in a row": 2}.get(name, 1)
    assert len(ahead.begun) - len(waiting.begun) == (0 if drained == BAD else vetoed)  # begun once more


def test_a_step_begun_after_one_that_is_rolled_back_leaves_nothing_behind() -> None:
    run, before = Ahead(spiked, ahead=True, spikes="rollback"), Ahead(healthy, ahead=False)
    with pytest.raises(Rollback) as rollback:
        run.run_ahead()
    assert rollback.value.step == BAD
    assert run.begun[-2:] == [BAD + 1, BAD]  # the recheck; the step behind is not begun again
    before.train(BAD - 1)
    assert same_weights(run.masters(), before.masters())


def test_a_run_that_stops_has_applied_nothing_behind_the_bad_step() -> None:
    run, before = Ahead(nan, ahead=True, recheck=False), Ahead(healthy, ahead=False)
    with pytest.raises(TrainingError, match=f"step {BAD}: the loss is nan"):
        run.run_ahead()
    before.train(BAD - 1)
    assert same_weights(run.masters(), before.masters())


def test_the_sums_of_the_host_values_are_those_of_the_first_execution() -> None:
    run = Ahead(flaky, ahead=True)
    values = iter(range(100))
    found = []
    for step in range(1, LAST + 1):
        run.stepper.begin(step_batch(run.run, step), lr=1e-3, host_values=lambda: [float(next(values)), 7.0])
        found += run.stepper.finished(drain=False)
    assert found[BAD - 1][1].host_sums == (BAD - 1, 7.0)
    assert found[BAD][1].host_sums == (BAD + 1, 7.0)  # begun again, asked again


@pytest.mark.parametrize(
    ("loss", "norm", "limits", "applied"),
    [
        (2.0, 1.0, UpdateLimits(), True),
        (2.0, 1.0, UpdateLimits(2.0, 1.0), True),
        (2.0, 1.0, UpdateLimits(1.9, 1.0), False),
        (2.0, 1.0, UpdateLimits(2.0, 0.9), False),
        (float("nan"), 1.0, UpdateLimits(), False),
        (2.0, float("inf"), UpdateLimits(), False),
        (float("-inf"), 1.0, UpdateLimits(), False),
    ],
)
def test_the_device_decides_as_the_host_does(loss: float, norm: float, limits: UpdateLimits, applied: bool) -> None:
    numbers = torch.tensor([loss, norm], dtype=torch.float64)
    decision = decide(numbers[0], numbers[1], limits=limits, clip=0.5, scale=8.0, after=None)
    assert bool(decision.vetoed) is not applied
    assert (limits.outcome(loss, norm, scaled=False) is StepOutcome.APPLIED) is applied
    if applied:
        assert float(decision.grad_scale) == pytest.approx(8.0 * (norm + 1e-6) / 0.5)
        after: Any = object.__new__(DeferredStep)
        after.vetoed = torch.tensor(True)
        assert bool(decide(numbers[0], numbers[1], limits=limits, clip=0.0, scale=1.0, after=after).vetoed)
