"""Anomalies on several ranks: updates that are not applied change no state; a flipped bit is found and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.run.anomalies.replicas import fingerprint
from tests import warm
from tests.conftest import selected
from tests.engines.comparison import layout
from tests.support import output_of


def run_cases(module: str, cases: Any, work: Path, *, processes: int) -> dict[str, Any]:
    """Runs MODULE CASES.json RESULTS.json on so many ranks; returns the content of RESULTS.json."""
    cases_file, results_file = work / f"cases{processes}.json", work / f"results{processes}.json"
    cases_file.write_text(json.dumps(cases))
    output_of(warm.run("-m", module, cases_file, results_file, processes=processes))
    results: dict[str, Any] = json.loads(results_file.read_text())
    return results


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


PLAIN = {"gradient_clipping": 0}
OWN_LOOPS = {
    **{f"torch-{stage}": {"engine": "torch", "zero_optimization": {"stage": stage}, **PLAIN} for stage in (0, 3)},
    **{f"deepspeed-{stage}": {"zero_optimization": {"stage": stage}, **PLAIN} for stage in (0, 1, 2, 3)},
    "deepspeed-0, clipped": {"zero_optimization": {"stage": 0}, "gradient_clipping": 0.15},
    "deepspeed-2, bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
}


@pytest.fixture(scope="module")
def own_loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_cases("tests.run.anomalies.own_loop", OWN_LOOPS, tmp_path_factory.mktemp("own_loop"), processes=2)


@pytest.mark.parametrize("name", OWN_LOOPS)
def test_a_non_finite_gradient_raises_and_changes_no_state(
    own_loops: dict[str, list[dict[str, Any]]], name: str
) -> None:
    for own in own_loops[name]:
        assert own["poisoned"]["raised"]
        assert own["poisoned"]["same"]
        assert own["poisoned"]["entries"] >= 4
        assert own["poisoned"]["losses"] == own["left out"]["losses"]  # exactly, for the following updates


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"

FLIPPED_ON_TWO = {
    "torch, replicated weights": layout(0, engine="torch", micro=2, rank=1, name=NORM),
    "torch, tensor parallel": layout(3, engine="torch", micro=2, parallel={"tp": 2}, rank=0, name=NORM),
    "torch, tied embedding": layout(2, engine="torch", micro=2, parallel={"pp": 2}, rank=1, name=EMBEDDING),
    "ZeRO-0, bf16": layout(0, engine="deepspeed", micro=2, bf16={"enabled": True}, rank=1, name=NORM),
    "ZeRO-1, bf16": layout(1, engine="deepspeed", micro=2, bf16={"enabled": True}, rank=0, name=EMBEDDING),
    "ZeRO-2": layout(2, engine="deepspeed", micro=2, rank=1, name=NORM),
    "ZeRO-3, tensor parallel": layout(3, engine="deepspeed", micro=2, parallel={"tp": 2}, rank=1, name=NORM),
    "ZeRO-1, tied embedding": layout(1, engine="deepspeed", micro=2, parallel={"pp": 2}, rank=0, name=EMBEDDING),
}
FLIPPED_ON_FOUR = {
    "torch, hybrid sharding": layout(3, engine="torch", micro=2, parallel={"hybrid_shard_size": 2}, rank=3, name=NORM),
    "ZeRO-2 on four": layout(2, engine="deepspeed", micro=2, rank=2, name=EMBEDDING),
}
FEW_REPLICAS = {"torch, tensor parallel", "ZeRO-3, tensor parallel", "torch, tied embedding", "ZeRO-1, tied embedding"}
"""Here only some parameters are on two ranks: norms, or the embedding and the head that is tied to it."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    work, results = tmp_path_factory.mktemp("replicas"), {}
    for processes, cases in ((2, FLIPPED_ON_TWO), (4, FLIPPED_ON_FOUR)):
        results |= run_cases("tests.run.anomalies.replicas", cases, work, processes=processes)
    return results


@pytest.mark.integration
@pytest.mark.parametrize("name", [*FLIPPED_ON_TWO, *FLIPPED_ON_FOUR])
def test_a_flipped_bit_is_found_by_all_ranks_and_named(checked: dict[str, list[dict[str, Any]]], name: str) -> None:
    ranks, flipped = checked[name], {**FLIPPED_ON_TWO, **FLIPPED_ON_FOUR}[name]
    assert all(own["before"] == "" for own in ranks)
    assert len({own["after"] for own in ranks}) == 1
    message = ranks[0]["after"]
    assert f"{flipped['name']}: " in message
    assert message.count("model.") == 1
    if name == "ZeRO-2 on four":
        assert f"rank {flipped['rank']} of 0, 1, 2, 3" in message
    elif name != "torch, hybrid sharding":
        assert "ranks 0, 1 do not agree" in message
    if name not in FEW_REPLICAS:
        assert {NORM, EMBEDDING} < set(ranks[0]["names"])


@pytest.mark.integration
def test_hybrid_sharding_compares_replicas_and_not_shards(checked: dict[str, list[dict[str, Any]]]) -> None:
    assert "ranks 1, 3 do not agree" in checked["torch, hybrid sharding"][0]["after"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_flipped_bit_and_an_exchange_of_elements_change_the_fingerprint(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    original = int(fingerprint(values))
    size = values.element_size() * 8
    for bit in range(size):
        other = values.clone()
        view = other.view({16: torch.int16, 32: torch.int32}[size])
        mask = 1 << bit if bit < size - 1 else -(1 << bit)
        view[bit * 7] ^= mask
        assert int(fingerprint(other)) != original, bit
    exchanged = values.clone()
    exchanged[[3, 4]] = exchanged[[4, 3]]
    assert int(fingerprint(exchanged)) != original
    assert int(fingerprint(values.clone())) == original
