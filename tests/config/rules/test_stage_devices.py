"""Speeds and memory of pipeline ranks: refused where there is no pipeline, or where the numbers do not fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.rules.stage_devices import StageDevices
from tests.conftest import tiny_config, write_config


def resolved(tmp_path: Path, *, processes: int = 2, **fields: Any) -> ResolvedRun:
    defaults = {"engine": "torch", "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
    config = tiny_config(tmp_path / "tokens", tmp_path / "run", **(defaults | fields))
    return resolve(load_config(write_config(tmp_path / "c.json", config)), world_size=processes)


@pytest.mark.parametrize(
    ("parallel", "field", "message"),
    [
        ({"stage_speeds": [1, 2]}, "parallel.stage_speeds", "there is no pipeline"),
        ({"stage_speeds": "measured"}, "parallel.stage_speeds", "there is no pipeline"),
        ({"stage_memory_gb": [40, 80]}, "parallel.stage_memory_gb", "there is no pipeline"),
        (
            {"pp": 2, "stage_speeds": [1, 2, 3]},
            "parallel.stage_speeds",
            "it has 3 numbers, and there are 2 pipeline ranks",
        ),
        (
            {"pp": 2, "stage_memory_gb": [80]},
            "parallel.stage_memory_gb",
            "it has 1 numbers, and there are 2 pipeline ranks",
        ),
        ({"pp": 2, "stage_speeds": [1, 0]}, "parallel.stage_speeds", "every pipeline rank has at least one layer"),
        (
            {"pp": 2, "stage_memory_gb": [-1, 80]},
            "parallel.stage_memory_gb",
            "every pipeline rank has at least one layer",
        ),
    ],
)
def test_what_does_not_fit_the_pipeline_is_refused(tmp_path: Path, parallel: Any, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        resolved(tmp_path, parallel=parallel)
    assert refused.value.field == field


def test_measured_speeds_are_refused_where_every_island_would_divide_the_layers_differently(tmp_path: Path) -> None:
    islands = {"name": "a", "steps": 2, "lighthouse": "127.0.0.1:29510"}
    with pytest.raises(ConfigError, match="the same list of speeds on every island"):
        resolved(tmp_path, parallel={"pp": 2, "stage_speeds": "measured"}, islands=islands)
    assert resolved(tmp_path, parallel={"pp": 2, "stage_speeds": [2, 1]}, islands=islands).topology.pp == 2


def test_a_fallback_layout_has_speeds_of_its_own(tmp_path: Path) -> None:
    launch = {"fallback_layouts": [{"pp": 2, "stage_speeds": [3, 1]}, {}]}
    four = {"pp": 4, "stage_speeds": [1, 1, 1, 2], "stage_memory_gb": [1, 1, 1, 2]}
    run = resolved(tmp_path, processes=4, parallel=four, launch=launch)
    assert run.stage_devices == StageDevices((1, 1, 1, 2), (1e9, 1e9, 1e9, 2e9))
    assert resolved(tmp_path, processes=2, parallel=four, launch=launch).stage_devices == StageDevices((3, 1))
    assert resolved(tmp_path, processes=1, parallel=four, launch=launch).stage_devices == StageDevices((1,))
