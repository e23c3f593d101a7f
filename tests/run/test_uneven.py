"""Ranks of uneven speed: shares of the batch and layers of stages, given or measured, follow the even curve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.cluster.status.run import read_status
from pipeline.cluster.status.text import lines_of
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.rules.stage_devices import StageDevices
from pipeline.config.sections.run import Config
from pipeline.config.shares import Shares
from pipeline.config.topology import Topology
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.run.uneven.balance_shares import check_compiled_shares, slowest_of_data_ranks
from pipeline.run.uneven.measure_stages import relative_speeds, slowest_of_pipeline_ranks
from pipeline.runtime.metrics.compute_clock import ComputeClock
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import ROOT, entry_point, launch, losses, tiny_config, write_config
from tests.engines.parallel.layouts import resolved
from tests.models.architectures import meta_of
from tests.support import output_of

STEPS = 20
"""Four measurements."""


def config_of(tokens: Path, run_dir: Path, **fields: Any) -> dict[str, Any]:
    """A run large enough that a step is computation."""
    model = {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }  # fmt: skip
    defaults = {
        "engine": "torch",
        "model": {"config": model},
        "data": {"sources": [{"path": str(tokens)}], "sequence_length": 128},
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 0},
        "run": {"dir": str(run_dir), "steps": STEPS, "seed": 7},
        "stragglers": {"every": None},
    }
    return tiny_config(tokens, run_dir, **(defaults | fields))


def dealt(run_dir: Path) -> dict[int, list[int]]:
    """Step -> samples of every data-parallel rank from then on."""
    return {row["step"]: row["samples"] for row in read_rows(run_dir, kind="event") if row["event"] == "shares"}


LAYOUTS: dict[str, dict[str, Any]] = {
    "torch-0": {},
    "torch-3": {"zero_optimization": {"stage": 3}},
    "deepspeed-1": {"engine": "deepspeed", "zero_optimization": {"stage": 1}},
    "deepspeed-3": {"engine": "deepspeed", "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 64}},
}
MAIN = ("torch-0",)


CASES = [pytest.param(name, marks=pytest.mark.integration if name in MAIN else pytest.mark.sweep) for name in LAYOUTS]


@pytest.mark.parametrize("layout", CASES)
def test_a_throttled_rank_loses_its_share_and_the_curve_stays(tokens: Path, tmp_path: Path, layout: str) -> None:
    config = config_of(tokens, tmp_path / "auto", parallel={"shares": "auto"}, **LAYOUTS[layout])
    words = entry_point("train.py", write_config(tmp_path / "auto.json", config))
    said = output_of(
        warm.run(ROOT / "tests/throttled.py", 1, 2, *words, cwd=tmp_path, processes=2, merged=True, timeout_s=900)
    )
    shares = dealt(tmp_path / "auto")
    assert shares[0] == [8, 8]
    of_step = [shares[max(since for since in shares if since < step)][1] for step in range(6, STEPS + 1)]
    assert 1 <= sum(of_step) / len(of_step) < 7, shares  # a third is 5.3, and two cores are shared with other tests
    assert f"samples per data rank {shares[max(shares)][0]}, {shares[max(shares)][1]}" in said
    status = read_status(tmp_path / "auto")
    assert list(status.shares) == shares[max(shares)]
    assert any("samples per data rank" in line for line in lines_of(status))
    even = config_of(tokens, tmp_path / "even", **LAYOUTS[layout])
    launch("train.py", write_config(tmp_path / "even.json", even), processes=2, timeout=900)
    expected, found = losses(tmp_path / "even"), losses(tmp_path / "auto")
    assert len(found) == STEPS
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 1e-5


@pytest.mark.sweep
def test_a_run_goes_on_from_even_to_uneven_shares_and_back(tokens: Path, tmp_path: Path) -> None:
    common = {"engine": "torch", "train_micro_batch_size_per_gpu": 4, "scheduler": {"type": "WarmupLR", "params": {}}}
    even = write_config(tmp_path / "even.json", tiny_config(tokens, tmp_path / "even", **common))
    launch("train.py", even, processes=2)
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", **common))
    for steps, shares in ((6, "null"), (13, "[3, 1]"), (20, "null")):
        launch("train.py", config, f"parallel.shares={shares}", f"run.steps={steps}", processes=2)
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "even")
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 1e-5


def test_the_slowest_rank_of_a_model_is_the_speed_of_its_data_rank() -> None:
    seconds = [1.0, 2.0, 3.0, 0.5]  # pp 2 x dp 2: ranks 0 and 2 are data rank 0
    assert slowest_of_data_ranks(Topology(pp=2, dp=2), seconds) == [3.0, 2.0]
    assert slowest_of_data_ranks(Topology(pp=2, dp=2), [1.0, 2.0, 3.0, 0.0]) == [3.0, 0.0]  # not measured yet


def test_forward_passes_are_timed_in_training_only() -> None:
    layer = torch.nn.Linear(256, 256)
    clock = ComputeClock([layer], gpu=False)
    layer(torch.ones(64, 256))  # before the first step
    assert clock.take() == (0, 0)
    clock.begin(3)
    layer(torch.ones(64, 256))
    layer.eval()
    layer(torch.ones(64, 256))
    layer.train()
    seconds, samples = clock.take()
    assert (0 < seconds < 1, samples) == (True, 3)
    clock.begin(2)
    clock.close()
    layer(torch.ones(64, 256))
    assert clock.take() == (0, 2)


def test_shares_that_would_be_compiled_again_are_refused_on_a_machine_that_compiles(tmp_path: Path) -> None:
    def run(**fields: Any) -> ResolvedRun:
        config = config_of(tmp_path / "tokens", tmp_path / "run", **fields)
        return resolve(parse(Config, config), world_size=2)

    measured = run(parallel={"shares": "auto"})
    check_compiled_shares(measured, compiled=False)
    with pytest.raises(ConfigError, match=r"set compile\.enabled to true, which moves whole micro-batches"):
        check_compiled_shares(measured, compiled=True)
    check_compiled_shares(run(parallel={"shares": "auto"}, compile={"enabled": True}), compiled=True)
    check_compiled_shares(run(parallel={"shares": [3, 1]}), compiled=True)


def test_a_sample_is_found_where_a_rank_had_it() -> None:
    shares = Shares(((2, 2), (1,), (3,)))
    assert [shares.place(sample) for sample in range(8)] == [
        (0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (2, 0), (2, 0), (2, 0),
    ]  # fmt: skip
    assert [shares.samples(rank) for rank in range(3)] == [range(4), range(4, 5), range(5, 8)]


def test_speeds_are_those_of_the_slowest_device_of_a_pipeline_rank() -> None:
    seconds = [1.0, 2.0, 3.0, 0.5]  # pp 2 x dp 2: ranks 0 and 1 are pipeline rank 0
    assert slowest_of_pipeline_ranks(Topology(pp=2, dp=2), seconds) == [2.0, 3.0]


def test_speeds_are_rounded_so_that_noise_moves_no_layers() -> None:
    assert relative_speeds([1.0, 2.0, 1.02, 0.99]) == (1.0, 0.5, 0.95, 1.0) == relative_speeds([1.0, 2.03, 1.03, 1.0])
    assert relative_speeds([1.0, 1000.0]) == (1.0, 0.05)  # a rank at a standstill still has a layer


def test_a_rank_that_takes_three_times_as_long_gets_fewer_layers() -> None:
    run, model = (
        resolved(world_size=2, parallel={"pp": 2, "stage_speeds": "measured"}),
        meta_of("llama", num_hidden_layers=12),
    )
    even = [stage.layers for stage in pipeline_stages(run, model)]
    slow = replace(run, measured_devices=StageDevices(relative_speeds([0.1, 0.3])))
    found = [stage.layers for stage in pipeline_stages(slow, model)]
    assert found[0][1] > even[0][1]
    assert found[1][1] - found[1][0] < even[1][1] - even[1][0]


def stages_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir, kind="event") if row["event"] == "stages"]


ENGINES = [
    pytest.param("torch", marks=pytest.mark.integration),
    pytest.param("deepspeed", marks=pytest.mark.sweep),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_measures_at_every_start_and_resumes_in_another_division(
    tokens: Path, tmp_path: Path, engine: str
) -> None:
    def config_of(name: str, **parallel: Any) -> dict[str, Any]:
        common = {"engine": engine, "zero_optimization": {"stage": 1 if engine == "deepspeed" else 0}}
        common |= {"scheduler": {"type": "WarmupLR", "params": {}}, "train_micro_batch_size_per_gpu": 2}
        config = tiny_config(tokens, tmp_path / name, **common, parallel={"pp": 2, **parallel})
        config["model"]["config"]["num_hidden_layers"] = 8
        return config

    even = write_config(tmp_path / "even.json", config_of("even"))
    launch("train.py", even, "run.steps=9", processes=2)
    config = write_config(tmp_path / "run.json", config_of("run", stage_speeds="measured"))
    words = entry_point("train.py", config, "run.steps=3")
    said = output_of(
        warm.run(ROOT / "tests/throttled.py", 1, 4, *words, cwd=tmp_path, processes=2, merged=True, timeout_s=900)
    )
    [slow] = stages_of(tmp_path / "run")
    assert slow["speeds"][0] > slow["speeds"][1]
    assert slow["layers"][1][1] - slow["layers"][1][0] < 4
    assert f"ranks {slow['speeds'][0]:.2f}, {slow['speeds'][1]:.2f} of the fastest" in said
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["details"]["stages"]["layers"] == slow["layers"]
    launch("train.py", config, "run.steps=6", "parallel.stage_speeds=[1,3]", processes=2)
    launch("train.py", config, "run.steps=9", processes=2)
    assert len(stages_of(tmp_path / "run")) == 2
    expected, found = losses(tmp_path / "even"), losses(tmp_path / "run")
    assert len(found) == 9
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 1e-5
