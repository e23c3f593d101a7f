"""`python -m pipeline prove`: equivalent layouts are proven, other runs are refuted, illegal configs are refused."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.proof.case import Case, CaseResult
from pipeline.proof.compare import first_gradient, relative_differences
from pipeline.proof.equivalence import check_equivalence
from pipeline.proof.tokens import write_tokens
from tests import warm
from tests.conftest import tiny_config, write_config
from tests.parity.choice import read_pairs
from tests.parity.matrix import LONG, SEQUENCE, VOCABULARY, reference_of
from tests.parity.run import launch


def prove(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "pipeline", "prove", *arguments)


def test_a_layout_is_proven_without_its_data_in_fp32_and_its_own_precision(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", bf16={"enabled": True}, engine="torch")
    path = write_config(tmp_path / "c.json", config)
    done = prove("--config", str(path), "--steps", "6", "--gradients")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch; FSDP2" in done.stdout
    assert "dp 2, 6 steps in fp32 and bf16" in done.stdout
    assert "model.layers.1.mlp.down_proj.weight" in done.stdout
    assert "proven in" in done.stdout
    assert not (tmp_path / "run").exists()


def test_an_illegal_layout_is_refused_before_anything_runs(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "nowhere", tmp_path / "run", parallel={"pp": 2})
    done = prove("--config", str(write_config(tmp_path / "c.json", config)))
    assert done.returncode == 2
    assert "use engine torch, or zero_optimization.stage 1" in done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, CaseResult]]:
    """One plain process four times: as it is, with beta1 0 and no clipping, from another seed, and one that fails."""
    work = tmp_path_factory.mktemp("runs")
    tokens = write_tokens(work / "tokens", vocab_size=VOCABULARY, tokens=12_000, longest=2 * SEQUENCE)
    values = {**read_pairs()[0], "clip": 0.1, "precision": "fp32"}
    plain = reference_of(values, str(tokens), length=LONG)
    params = plain.config["optimizer"]["params"]
    bare = {**plain.config, "gradient_clipping": 0.0}
    bare["optimizer"] = {"type": "AdamW", "params": {**params, "betas": [0.0, 0.0]}}
    seeded = {**plain.config, "run": {**plain.config["run"], "seed": 8}}
    failing = {**plain.config, "model": {"config": {**plain.config["model"]["config"], "hidden_act": "none"}}}
    named = {"plain": plain.config, "bare": bare, "seeded": seeded, "failing": failing}
    return launch([replace(plain, name=name, config=config) for name, config in named.items()], work)


def test_the_first_gradient_is_recovered_from_the_optimizer_state(
    runs: dict[str, tuple[Case, CaseResult]],
) -> None:
    # with beta1 0 and no clipping the first moment is the gradient; recovered from other values it is equal to rounding
    assert max(relative_differences(first_gradient(*runs["plain"]), first_gradient(*runs["bare"])).values()) < 1e-6
    norms = [float(g.double().square().sum()) for g in first_gradient(*runs["bare"]).values()]
    assert sum(norms) ** 0.5 == pytest.approx(runs["bare"][1].grad_norms[1], rel=1e-6)


def test_a_run_with_another_seed_is_refuted_in_every_tensor(runs: dict[str, tuple[Case, CaseResult]]) -> None:
    result = check_equivalence(runs["seeded"], runs["plain"], fp32_reference=runs["plain"])
    assert not result.passed
    assert {each.quantity for each in result.comparisons if not each.passed} >= {"loss", "gradient", "gradient norm"}
    assert len(result.wrong_gradients()) == len(first_gradient(*runs["plain"]))
    assert check_equivalence(runs["plain"], runs["plain"], fp32_reference=runs["plain"]).passed


def test_the_error_of_a_failed_rank_is_reported(runs: dict[str, tuple[Case, CaseResult]]) -> None:
    result = check_equivalence(runs["failing"], runs["plain"], fp32_reference=runs["plain"])
    assert not result.passed
    assert "hidden_act" in str(result.error) or "none" in str(result.error)


def test_a_missing_or_nan_tensor_has_infinite_difference() -> None:
    ones = {"a": torch.ones(3), "b": torch.ones(2)}
    assert relative_differences({"a": torch.ones(3)}, ones) == {"a": 0.0, "b": float("inf")}
    assert relative_differences({**ones, "b": torch.tensor([1.0, float("nan")])}, ones)["b"] == float("inf")


def test_a_gradient_that_is_zero_but_for_rounding_is_compared_relative_to_the_average() -> None:
    expected: dict[str, Any] = {"a": torch.full((100,), 1.0), "b": torch.full((100,), 1e-12)}
    found = {"a": expected["a"], "b": -expected["b"]}
    assert relative_differences(found, expected)["b"] < 1e-8
