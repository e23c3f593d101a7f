"""Laws 3 and 4 for the native engine: layouts of every kind match one process, and states are exchanged with it.

The micro-batches are synthetic; `tests/parity` runs complete training runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from foundation.errors import TrainingError
from pipeline.config.sections.deepspeed import Fp16Section
from pipeline.engines.loss_scale import LossScaler
from tests.engines.comparison import EXPERTS, assert_within_tolerance, differences_fixture, layout, layout_params


def parallel(stage: int, **keys: Any) -> dict[str, Any]:
    return layout(stage, parallel=keys)


ON_TWO = {
    "stage 1 on 2, 20 steps": layout(1, steps=20),
    "stage 1, bf16, chunked loss": layout(1, bf16={"enabled": True}, loss={"chunk": 8}),
    "sharded weights, gathered per step, on 2": layout(2),
    "dualpipev": parallel(0, pp=2, schedule="dualpipev"),
    "pipeline, 3 times as fast on the first rank": parallel(2, pp=2, stage_speeds=[3, 1]),
    "interleaved 1f1b, twice as fast on the last rank": {
        **parallel(2, pp=2, schedule="interleaved_1f1b", stage_speeds=[1, 2]),
        "model": {"num_hidden_layers": 8},
    },
    "bf16, reduced in bf16": layout(3, bf16={"enabled": True}, communication_data_type="bf16"),
    "bf16 pipeline": {**parallel(2, pp=2), "bf16": {"enabled": True}},
    # gradients overflow at the initial scale: the layout and the reference must skip the same steps
    "fp16": layout(3, fp16={"enabled": True, "initial_scale_power": 22, "hysteresis": 1}),
}


ON_FOUR = {
    "stage 1, hybrid sharding 2 x 2, clipped": {**parallel(1, hybrid_shard_size=2), "gradient_clipping": 0.1},
    "stage 1, dp 2 x tp 2": parallel(1, tp=2),
    "stage 1, pp 2 x dp 2, interleaved": parallel(1, pp=2, schedule="interleaved_1f1b"),
    "stage 1, experts, ep 2": {**parallel(1, ep=2), "model": EXPERTS},
    "hybrid sharding 2 x 2": parallel(3, hybrid_shard_size=2),
    "hpZ, 2 of 4": layout(3, zero={"zero_hpz_partition_size": 2}),
    "pp 2 x tp 2, untied": {**parallel(2, pp=2, tp=2), "model": {"tie_word_embeddings": False}},
    "pp 4, dualpipev, clipped, 20 steps": {
        **parallel(2, pp=4, schedule="dualpipev"),
        "model": {"num_hidden_layers": 8},
        "gradient_clipping": 0.1,
        "steps": 20,
    },
    "pp 2 x tp 2, dualpipev, activation checkpointing": {
        **parallel(2, pp=2, tp=2, schedule="dualpipev"),
        "memory": {"activation_checkpointing": "full"},
    },
    "experts": layout(3, model=EXPERTS),
}


ALWAYS = {
    "sharded weights, gathered per step, on 2",
    "bf16, reduced in bf16",
    "fp16",
    "hybrid sharding 2 x 2",
    "pp 2 x tp 2, untied",
    "experts",
}


"""The others run with `make sweep-tests`. None is a layout of `make sweep-parity`, but for two pipelines."""


found = differences_fixture("test_a_layout_follows_one_process", {"torch": {2: ON_TWO, 4: ON_FOUR}}, ALWAYS)


@pytest.mark.integration
@pytest.mark.parametrize("name", layout_params(ALWAYS, ON_TWO, ON_FOUR))
def test_a_layout_follows_one_process(found: dict[str, dict[str, float]], name: str) -> None:
    assert_within_tolerance(found[name], name)


def test_fp16_skips_the_steps_that_overflow_and_no_others(found: dict[str, dict[str, float]]) -> None:
    assert 0 < found["fp16"]["skipped"] < 4  # of 4 steps


def test_a_rank_keeps_its_share_of_the_weights_and_asks_for_no_other_values(
    found: dict[str, dict[str, float]],
) -> None:
    # layout_worker.make_engine asserts in every layout that the first values a rank has asked for are its shards
    assert found["sharded weights, gathered per step, on 2"]["share"] == pytest.approx(1 / 2)
    assert found["experts"]["share"] == pytest.approx(1 / 4, rel=0.01)  # rows that 4 does not divide
    assert found["hybrid sharding 2 x 2"]["share"] == pytest.approx(1 / 2)
    assert found["pp 2 x tp 2, untied"]["share"] == pytest.approx(1 / 4, rel=0.1)  # norms are on every tp rank


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
