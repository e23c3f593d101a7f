"""Measured speeds of pipeline stages: a slow rank gets fewer layers, and a run goes on in another division."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.rules.stage_devices import StageDevices
from pipeline.config.topology import Topology
from pipeline.engines.parallel.partition import pipeline_stages
from pipeline.run.uneven.measure_stages import relative_speeds, slowest_of_pipeline_ranks
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import ROOT, entry_point, launch, losses, tiny_config, write_config
from tests.engines.parallel.layouts import resolved
from tests.models.architectures import meta_of
from tests.support import output_of


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
