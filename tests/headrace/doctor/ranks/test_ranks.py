"""The checks of `headrace doctor` on ranks, healthy and with each fault put in, on four CPU processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.doctor.checks.shared import LAYOUTS
from tests.engines.parallel.ranks import Ranks
from tests.headrace.doctor.ranks.on_ranks import BAD, check, failed


def found(ranks: Ranks, name: str, work: Path, **options: Any) -> list[list[dict[str, Any]]]:
    """The findings of every rank."""
    given = {"config": None, "fault": None, "limit_s": 60.0, **options}
    return ranks.run(check, name, str(work), given["config"], given["fault"], given["limit_s"])


def only(findings: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rank 0's findings, where the others have none."""
    assert not any(findings[1:])
    return findings[0]


def config_with(path: Path, **fields: Any) -> str:
    path.write_text(json.dumps({**LAYOUTS["own"], **fields}))
    return str(path)


EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("parallel", "stage", "groups"),
    [
        ({}, 3, "dp 4, all 4 ranks"),
        ({"hybrid_shard_size": 2}, 3, "dp 4, replicate 2, shard 2, all"),
        ({"ep": 2}, 3, "dp 4, edp_shard 2, ep 2, all"),
        ({"pp": 4, "schedule": "interleaved_1f1b"}, 0, "pp 4, link 1 of pp 4, tied weights 2, all"),
        ({"pp": 2, "tp": 2}, 0, "pp 2, tp 2, tied weights 2, stage 2, all"),
    ],
)
def test_every_group_of_the_layout_is_connected(
    ranks: Ranks, tmp_path: Path, parallel: dict[str, Any], stage: int, groups: str
) -> None:
    fields: dict[str, Any] = {"parallel": parallel, "zero_optimization": {"stage": stage}}
    fields |= {"gradient_accumulation_steps": 8}
    if "ep" in parallel:
        fields["model"] = {"config": EXPERTS}
    config = config_with(tmp_path / "c.json", **fields)
    [finding] = only(found(ranks, "ranks_connection", tmp_path, config=config))
    assert finding["passed"], finding
    assert groups in finding["text"], finding
    assert finding["figures"]["memory_before_mib"] > 100
    assert finding["figures"]["connections_mib"] >= 0


def test_a_layout_that_the_ranks_cannot_form_is_said_and_all_ranks_are_connected(ranks: Ranks, tmp_path: Path) -> None:
    config = config_with(tmp_path / "c.json", parallel={"tp": 8})
    not_checked, connected = only(found(ranks, "ranks_connection", tmp_path, config=config))
    assert not_checked["passed"] is None
    assert "4 ranks cannot form it" in not_checked["text"]
    assert connected["passed"]


def test_bandwidth_is_measured_and_pairs_are_alike(ranks: Ranks, tmp_path: Path) -> None:
    uneven, collectives, pairs = only(found(ranks, "ranks_bandwidth", tmp_path))
    assert uneven["passed"]
    assert collectives["passed"] is None  # a CPU has no rate to compare with
    names = ("all_reduce", "all_gather", "reduce_scatter", "uneven_all_to_all")
    assert all(collectives["figures"][f"{name}_gb_per_s"] > 0.001 for name in names)
    assert pairs["passed"], pairs
    assert pairs["text"].startswith("12 directions")


def test_a_slow_link_is_named_by_its_ranks(ranks: Ranks, tmp_path: Path) -> None:
    pairs = only(found(ranks, "ranks_bandwidth", tmp_path, fault="slow pair"))[-1]
    assert pairs["passed"] is False
    assert f"rank {BAD} on " in pairs["where"]
    assert " to rank 0 on " in pairs["where"]
    assert "1 are slow" in pairs["text"]
    assert pairs["figures"]["least_gb_per_s"] < 0.03


def test_parts_of_an_uneven_all_to_all_in_the_wrong_order_are_found(ranks: Ranks, tmp_path: Path) -> None:
    wrong = only(found(ranks, "ranks_bandwidth", tmp_path, fault="swapped splits"))[0]
    assert wrong["passed"] is False
    assert f"rank {BAD} on" in wrong["text"]


def test_attention_across_ranks_equals_one_ranks(ranks: Ranks, tmp_path: Path) -> None:
    findings = only(found(ranks, "ranks_attention", tmp_path))
    assert [each["passed"] for each in findings] == [True, True], findings
    assert [each["text"].split(" in ")[0] for each in findings] == ["ring attention", "Ulysses"]


@pytest.mark.parametrize("fault", ["half a gradient", "swapped gradients", "swapped chunks"])
def test_a_wrong_gradient_of_attention_is_found(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    findings = only(found(ranks, "ranks_attention", tmp_path, fault=fault))
    [wrong] = failed(findings)
    assert wrong["text"].startswith("Ulysses" if fault == "swapped chunks" else "ring attention")
    assert wrong["figures"]["largest_error"] > 2 * wrong["figures"]["tolerance"]


def test_a_rank_that_sleeps_is_named_with_its_host_within_the_limit(ranks: Ranks, tmp_path: Path) -> None:
    # the last test of these processes: the rank that sleeps makes groups that the others do not have
    findings = found(ranks, "ranks_connection", tmp_path, fault="sleeps", limit_s=3.0)
    [finding] = findings[0]
    assert finding["passed"] is False
    assert f"rank {BAD} on " in finding["text"]
    assert "  try: check that host" in finding["text"]
