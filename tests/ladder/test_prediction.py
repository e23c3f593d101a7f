"""A ladder predicts within its interval, and does not extrapolate where its rungs disagree or are left unexplained."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.ladder.fit import Points
from pipeline.ladder.prediction import Verdict, judge
from tests.ladder.recorded import loss, made, real

LARGE = {"parameters": 1.9e6, "tokens": 2.3e6}


def _judge(points: Points, names: list[str], **changes: float) -> Verdict:
    return judge(points, names, **LARGE, **{"tolerance": 0.02, **changes})


def test_a_clean_ladder_predicts_the_large_run() -> None:
    verdict = _judge(*made(noise=0.002))
    assert verdict.reasons == ()
    assert verdict.prediction is not None
    assert verdict.prediction.loss == pytest.approx(loss(*LARGE.values()), rel=0.03)
    assert verdict.prediction.low < loss(*LARGE.values()) < verdict.prediction.high


def test_more_noise_makes_a_wider_interval() -> None:
    quiet, loud = (_judge(*made(noise=noise, seed=2), tolerance=0.1).prediction for noise in (0.001, 0.01))
    assert quiet is not None
    assert loud is not None
    assert loud.high - loud.low > quiet.high - quiet.low


def test_rungs_that_disagree_are_named_and_nothing_is_extrapolated() -> None:
    points, names = made(noise=0.0)
    losses = points.losses.copy()
    losses[11] = losses[2] * 1.2  # the largest rung's longest run is worse than the smallest rung's
    verdict = _judge(Points(points.parameters, points.tokens, losses), names)
    assert verdict.prediction is None
    assert any("the rungs disagree: run-11" in reason for reason in verdict.reasons)


def test_a_run_that_diverged_is_named() -> None:
    points, names = made(noise=0.0)
    losses = points.losses.copy()
    losses[3] = float("nan")
    verdict = _judge(Points(points.parameters, points.tokens, losses), names)
    assert verdict.prediction is None
    assert any("run-3 is not finite" in reason for reason in verdict.reasons)


def test_rungs_that_a_law_of_the_others_does_not_predict_are_too_poor() -> None:
    """No pair disagrees, but the losses are along no law of this form: the largest rung falls off a cliff."""
    points, names = made(noise=0.0)
    losses = np.where(points.parameters > 4e5, points.losses * 0.8, points.losses)
    verdict = _judge(Points(points.parameters, points.tokens, losses), names)
    assert verdict.prediction is None
    assert any("rungs left out" in reason for reason in verdict.reasons)


def test_two_sizes_are_too_few() -> None:
    points, names = made(noise=0.0)
    verdict = _judge(points.take(np.arange(6)), names[:6])
    assert verdict.prediction is None
    assert any("too few" in reason for reason in verdict.reasons)


def test_the_same_ladder_gives_the_same_interval() -> None:
    first, second = (_judge(*made(noise=0.003)).prediction for _ in range(2))
    assert first == second


TEACHER = {"parameters": 1_574_208.0, "tokens": 1_925_120.0}


def test_the_real_ladder_of_the_demo_gives_the_published_figures() -> None:
    """Those of docs/how-to/scaling-ladder.md; losses there are rounded to four decimals."""
    verdict = judge(*real(), **TEACHER, tolerance=0.02)
    assert [each.form for each in verdict.left_out] == ["fixed exponents", "free exponents"]
    assert [each.rms for each in verdict.left_out] == pytest.approx([0.0182, 0.0334], abs=5e-4)
    assert verdict.prediction is not None
    assert verdict.prediction.loss == pytest.approx(4.103, abs=2e-3)
    assert (verdict.prediction.low, verdict.prediction.high) == pytest.approx((3.751, 4.234), abs=0.02)


def test_the_real_ladder_is_refused_by_a_stricter_test() -> None:
    verdict = judge(*real(), **TEACHER, tolerance=0.01)
    assert verdict.prediction is None
    assert any("error of 1.8%" in reason for reason in verdict.reasons)
