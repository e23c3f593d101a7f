"""Dynamic loss scaling: when the scale rises and falls, when a run ends, and that it resumes."""

from __future__ import annotations

from typing import Any

import pytest

from foundation.errors import TrainingError
from pipeline.config.sections.deepspeed import Fp16Section
from pipeline.engines.loss_scale import LossScaler


def scale(**fields: Any) -> LossScaler:
    """A dynamic loss scaler that starts at 8."""
    return LossScaler(Fp16Section(enabled=True, initial_scale_power=3, **fields))


def after(scale: LossScaler, overflows: str) -> float:
    """The scale after a sequence of steps; x is an overflow."""
    for step, each in enumerate(overflows, start=1):
        scale.update(step, overflow=each == "x")
    return scale.value


@pytest.mark.parametrize(
    ("overflows", "value"),
    [("..", 8.0), ("...", 16.0), ("......", 32.0), ("x", 8.0), ("xx", 4.0), ("xxx", 2.0), ("x.x", 4.0), ("xx...", 8.0)],
)
def test_the_scale_doubles_after_a_window_and_halves_after_its_hysteresis(overflows: str, value: float) -> None:
    assert after(scale(loss_scale_window=3, hysteresis=2), overflows) == value


def test_a_step_without_overflow_restores_consecutive_hysteresis() -> None:
    assert after(scale(hysteresis=2, consecutive_hysteresis=True), "x.x.x") == 8.0


def test_a_static_scale_never_changes() -> None:
    fixed = LossScaler(Fp16Section(enabled=True, loss_scale=64.0, loss_scale_window=1))
    assert after(fixed, "x.x.xx") == 64.0


def test_an_overflow_at_the_smallest_scale_ends_the_run() -> None:
    with pytest.raises(TrainingError, match="smallest loss scale"):
        after(scale(hysteresis=1, min_loss_scale=2.0), "xxx")


@pytest.mark.parametrize("later", ["x..", "..x"])  # hysteresis, and the steps without overflow, of before count
def test_a_restored_scale_continues_as_without_interruption(later: str) -> None:
    uninterrupted, first = scale(loss_scale_window=3), scale(loss_scale_window=3)
    after(first, "x..")
    second = scale(loss_scale_window=3)
    second.load_tensor(first.to_tensor())
    assert after(uninterrupted, f"x..{later}") == after(second, later)
    assert (uninterrupted.to_tensor() == second.to_tensor()).all()
