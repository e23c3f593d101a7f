"""Spike detection, and the arithmetic of skipped data."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pipeline.config.accounts import StepAccounts
from pipeline.data.skips import NO_SKIPS, Skip, Skips, skips_of
from pipeline.run.anomalies.spike_detector import SpikeDetector


def curve(steps: int, *, seed: int) -> list[tuple[float, float]]:
    """Losses and gradient norms like those of training: falling, noisy, the norm with a long tail."""
    draw = np.random.default_rng(seed)
    at = np.arange(steps)
    losses = 2.5 + 6.0 * np.exp(-at / 150) + 0.05 * draw.standard_normal(steps)
    norms = (0.4 + 2.0 * np.exp(-at / 80)) * np.exp(0.25 * draw.standard_normal(steps))
    return [(float(loss), float(norm)) for loss, norm in zip(losses, norms, strict=True)]


def detector_with(**fields: int) -> SpikeDetector:
    return SpikeDetector(**{"window": 128, "deviations": 10.0, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_a_falling_noisy_curve_has_no_spikes(seed: int) -> None:
    detector = detector_with()
    for step, numbers in enumerate(curve(2000, seed=seed), start=1):
        assert detector.limits(step).check(*numbers) is None
        detector.add(step, *numbers)


def test_a_spike_of_the_loss_and_one_of_the_norm_are_found_with_their_thresholds() -> None:
    detector = detector_with()
    for step, numbers in enumerate(curve(500, seed=1), start=1):
        detector.add(step, *numbers)
    limits = detector.limits(502)
    spike = limits.check(5.0, 0.4)
    assert (spike.kind, spike.what) == ("spike", "loss")
    assert 2.5 < spike.median < 2.9 < spike.threshold < 5.0
    of_norm = limits.check(2.6, 8.0)
    assert of_norm.what == "grad_norm"
    assert limits.check(0.1, 0.01) is None  # a low value is never a spike


@pytest.mark.parametrize(
    ("steps", "calm", "spike"),
    # the spread of a flat curve is nothing; after 31 steps there is too little to compare with
    [(200, (2.05, 1.3), (2.5, 1.0)), (31, (200.0, 100.0), None), (32, None, (200.0, 100.0))],
)
def test_a_flat_or_short_curve_raises_no_false_alarm(
    steps: int, calm: tuple[float, float] | None, spike: tuple[float, float] | None
) -> None:
    detector = detector_with()
    for step in range(1, steps + 1):
        detector.add(step, 2.0, 1.0)
    assert calm is None or detector.limits(steps + 2).check(*calm) is None
    assert spike is None or detector.limits(steps + 2).check(*spike) is not None


def test_the_limits_of_a_step_do_not_depend_on_whether_the_step_before_is_known() -> None:
    ahead, behind = detector_with(window=40), detector_with(window=40)
    numbers = curve(100, seed=3)
    for step, each in enumerate(numbers[:-1], start=1):
        ahead.add(step, *each)
        assert ahead.limits(step + 1) == behind.limits(step + 1)  # of the steps up to step - 1
        behind.add(step, *each)
    assert len(ahead.limits(99).thresholds) == 2
    assert ahead.limits(100) != ahead.limits(101)  # step 99 counts from there on


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_detected_at_once_except_scaled_gradients_of_fp16(bad: float) -> None:
    for numbers in ((bad, 1.0), (1.0, bad)):
        found = detector_with().limits(1).check(*numbers)
        assert found.kind == "non_finite"
    assert detector_with(scaled=True).limits(1).check(1.0, bad) is None
    assert detector_with(scaled=True).limits(1).check(bad, bad) is not None


def test_a_detector_restored_from_its_state_gives_the_same_results() -> None:
    whole, first = detector_with(), detector_with()
    numbers = curve(400, seed=4)
    for step, pair in enumerate(numbers[:300], start=1):
        whole.add(step, *pair)
        first.add(step, *pair)
    second = detector_with()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, pair in enumerate(numbers[300:], start=301):
        whole.add(step, *pair)
        second.add(step, *pair)
    assert second.state_dict() == whole.state_dict()
    assert second.limits(401) == whole.limits(401)


def test_a_run_without_skips_trains_on_data_step_s_in_step_s() -> None:
    assert [NO_SKIPS.data_step(step) for step in (1, 2, 99)] == [1, 2, 99]
    assert NO_SKIPS.samples(3, StepAccounts.constant(8, 32, 9)) == range(16, 24)


def test_after_a_rollback_all_data_since_the_checkpoint_is_skipped() -> None:
    skips = NO_SKIPS.past(13, since=10)
    assert [skips.data_step(step) for step in (9, 10, 11, 12)] == [9, 10, 14, 15]
    again = skips.past(12, since=10)  # its data was data step 15
    assert [again.data_step(step) for step in (10, 11, 12)] == [10, 16, 17]
    later = again.past(25, since=20)
    assert [later.data_step(step) for step in (20, 21)] == [25, 31]


@pytest.mark.parametrize("seed", range(20))
def test_no_data_is_repeated_and_none_after_a_bad_step_is_lost(seed: int) -> None:
    draw = np.random.default_rng(seed)
    skips, checkpoint = NO_SKIPS, 0
    for _ in range(5):
        checkpoint += int(draw.integers(0, 5))
        bad = checkpoint + int(draw.integers(1, 6))
        worst = skips.data_step(bad)
        skips = skips.past(bad, since=checkpoint)
        assert skips.data_step(checkpoint + 1) == worst + 1
    seen = [skips.data_step(step) for step in range(1, 60)]
    assert seen == sorted(set(seen))


def test_skips_come_from_the_newest_rollback_event_up_to_the_checkpoint_or_from_its_manifest() -> None:
    skips = Skips((Skip(11, 3),))
    assert Skips.of(json.loads(json.dumps(skips.plain()))) == skips
    assert Skips.of(None) == NO_SKIPS
    rollback = {"event": "rollback", "step": 10, "skips": [[11, 3], [11, 2]]}
    assert skips_of({"skips": [[11, 3]]}, [], step=10) == skips
    assert skips_of({"skips": [[11, 3]]}, [rollback], step=10).data_step(11) == 16
    assert skips_of({}, [rollback], step=9) == NO_SKIPS  # that step is before the rollback, which will happen again
