"""Non-finite updates and closed update gates: a step that is not applied leaves the engine's state unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import selected
from tests.engines.comparison import layout
from tests.run.anomalies.cases import run_cases

FP16 = layout(0, engine="torch", micro=2, fp16={"enabled": True, "initial_scale_power": 10})
HALF = {"bf16": {"enabled": True}}
ON_ONE = {
    "reference": layout(0, engine="torch", micro=2),
    "reference, bf16": layout(0, engine="torch", micro=2, **HALF),
}
ON_TWO = {
    "FSDP2, sharded per layer": layout(3, engine="torch", micro=2),
    "FSDP2, bf16": layout(2, engine="torch", micro=2, **HALF),
    "torch pipeline": layout(2, engine="torch", micro=2, parallel={"pp": 2}),
    "ZeRO-0, clipped": layout(0, engine="deepspeed", micro=2, gradient_clipping=0.1),
    "ZeRO-1": layout(1, engine="deepspeed", micro=2),
    "ZeRO-1, bf16": layout(1, engine="deepspeed", micro=2, **HALF),
    "ZeRO-2, bf16, clipped": layout(2, engine="deepspeed", micro=2, gradient_clipping=0.1, **HALF),
    "ZeRO-2, optimizer on the host": layout(
        2, zero={"offload_optimizer": {"device": "cpu"}}, engine="deepspeed", micro=2
    ),
    "ZeRO-3": layout(3, engine="deepspeed", micro=2),
    "ZeRO-3, all on the host": layout(
        3,
        zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        engine="deepspeed",
        micro=2,
        **HALF,
    ),
    "ZeRO-0 pipeline": layout(0, engine="deepspeed", micro=2, parallel={"pp": 2}, **HALF),
    "ZeRO-1 pipeline": layout(1, engine="deepspeed", micro=2, parallel={"pp": 2}),
    "ZeRO-1 pipeline, bf16": layout(1, engine="deepspeed", micro=2, parallel={"pp": 2}, **HALF),
}
ALWAYS = {"reference", "FSDP2, sharded per layer", "ZeRO-0, clipped", "ZeRO-3", "ZeRO-1 pipeline, bf16"}
NAMES = [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.sweep) for n in (*ON_ONE, *ON_TWO)]
EXPECTED = {"loss": "non_finite", "gradient": "non_finite", "gate": "refused"}


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    work, results = tmp_path_factory.mktemp("poison"), {}
    wanted = set(selected(request.session, test_a_step_not_applied_changes_no_state, "name")) | {"reference"}
    for processes, every in ((1, {**ON_ONE, "fp16": FP16}), (2, ON_TWO)):
        cases = {name: layout for name, layout in every.items() if name in wanted | {"fp16"}}
        if not cases:
            continue
        results |= run_cases("tests.run.anomalies.poison", cases, work, processes=processes)
    return results


@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", EXPECTED)
def test_a_step_not_applied_changes_no_state(results: dict[str, list[dict[str, Any]]], name: str, fault: str) -> None:
    """For a NaN loss, a NaN gradient of a finite loss (both on one data rank only), and a closed gate."""
    for own in results[name]:
        result = own[fault]
        assert result["outcome"] == EXPECTED[fault]
        assert result["entries"] > 30  # weights, moments and the step counter have been compared, in shards
        assert result["same"]
        assert result["same score"]
        assert result["losses"] == own["without"]  # to the last bit


@pytest.mark.integration
@pytest.mark.parametrize("name", [each for each in NAMES if {**ON_ONE, **ON_TWO}[each.values[0]]["engine"] == "torch"])
def test_a_step_begun_after_a_skipped_one_is_skipped_too(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    for own in results[name]:
        result = own["ahead"]
        assert result["outcome"] == "non_finite"
        assert result["same"]
        assert result["same score"]
        assert result["losses"] == own["without"]  # to the last bit, as if neither had been begun


def test_a_step_with_a_closed_gate_reports_the_same_loss_and_norm(results: dict[str, list[dict[str, Any]]]) -> None:
    (own,) = results["reference"]
    assert float(own["gate"]["norm"]) > 0
    assert own["gate"]["norm"] == own["gate"]["norm again"]
    assert own["gate"]["loss"] == own["gradient"]["loss"]  # the same loss, with a NaN gradient


def test_fp16_counts_an_overflow_but_not_a_closed_gate(results: dict[str, list[dict[str, Any]]]) -> None:
    (own,) = results["fp16"]
    assert own["gradient"]["outcome"] == "overflow"
    assert not own["gradient"]["same"]  # one overflow fewer until the scale is lowered
    assert own["loss"]["outcome"] == "non_finite"  # no loss scale helps a forward pass
    assert own["loss"]["same"]
    assert own["gate"]["same"]
    assert own["gate"]["losses"] == own["without"]
