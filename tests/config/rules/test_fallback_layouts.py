"""Fewer processes than a layout needs: fallback layouts, and shipped configs on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.curve import curve_fields
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.own_loop.config import load_loop_config
from tests.conftest import ROOT, tiny_config, write_config

SMALL = ("zero", "fsdp", "offload", "pp", "tp", "3d")
"""Beginnings of the names of shipped configs of a model that any one rank holds."""


def run_of(tmp_path: Path, processes: int, fallbacks: list[dict[str, Any]] | None = None, **keys: Any) -> ResolvedRun:
    config = tiny_config(tmp_path / "tokens", tmp_path / "run", **{"engine": "torch", **keys})
    config["launch"] = {"fallback_layouts": fallbacks or []}
    return resolve(load_config(write_config(tmp_path / "c.json", config)), world_size=processes)


def pp_tp(tmp_path: Path, processes: int, fallbacks: list[dict[str, Any]]) -> ResolvedRun:
    return run_of(tmp_path, processes, fallbacks, parallel={"pp": 2, "tp": 2})


@pytest.mark.parametrize(
    ("processes", "sizes", "spare"),
    [
        (8, (2, 2, 1, 2), 0),
        (7, (2, 1, 1, 2), 3),  # the configured layout fits: it is preferred, with spares
        (4, (2, 1, 1, 2), 0),
        (3, (1, 1, 1, 2), 1),  # the first fallback is preferred
        (1, (1, 1, 1, 1), 0),
    ],
)
def test_the_first_layout_that_fits_the_processes_is_taken(
    tmp_path: Path, processes: int, sizes: tuple[int, ...], spare: int
) -> None:
    run = pp_tp(tmp_path, processes, [{"tp": 2}, {}])
    assert (run.topology.sizes, run.spare) == (sizes, spare)
    assert ("fallback layout" in run.layout) == (processes < 4)
    assert run.batch.samples == 8


def test_the_layout_line_says_which_fallback_and_why(tmp_path: Path) -> None:
    text = "fallback layout 2 of 2, since 1 process is there and the configured layout takes 4"
    assert pp_tp(tmp_path, 1, [{"tp": 2}, {}]).layout.endswith(text)


def test_a_fallback_is_the_whole_layout_and_the_curve_stays(tmp_path: Path) -> None:
    keys = {
        "parallel": {"pp": 2, "schedule": "interleaved_1f1b"},
        "tensor_parallel": {"autotp_size": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    }
    fallback = {"engine": "deepspeed", "zero_stage": 1, "train_micro_batch_size_per_gpu": 1}
    whole, small = (run_of(tmp_path, count, [fallback], **keys) for count in (4, 3))
    assert small.topology.sizes == (1, 3, 1, 1)
    assert (small.config.engine, small.config.zero_optimization.stage, small.batch.micro) == ("deepspeed", 1, 1)
    assert small.batch.rows == 9  # 8 samples
    assert json.dumps(curve_fields(small)) == json.dumps(curve_fields(whole))


@pytest.mark.parametrize(
    ("fallback", "words"),
    [
        (
            {"tp": 8},
            "fallback_layouts.1 = {'tp': 8}\n  why: in this layout parallel.tp cannot be 8: it does not",
        ),
        (
            {"engine": "deepspeed", "zero_stage": 3, "pp": 2},
            "engine deepspeed at ZeRO stage 3 does not support pipeline",
        ),
        ({"virtual_stages": 2}, "in this layout parallel.virtual_stages cannot be 2: there is no pipeline"),
        ({"dp": 2}, "launch.fallback_layouts.1.dp"),
    ],
)
def test_a_fallback_that_could_never_run_is_refused_before_it_is_needed(
    tmp_path: Path, fallback: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        pp_tp(tmp_path, 8, [{}, fallback])
    assert words in str(caught.value)


def test_all_that_is_wrong_with_a_fallback_is_told_at_once(tmp_path: Path) -> None:
    zero = {"stage": 2, "contiguous_gradients": True}
    with pytest.raises(ConfigError) as caught:
        run_of(tmp_path, 8, [{"tp": 8, "engine": "torch"}], engine="deepspeed", zero_optimization=zero)
    said = str(caught.value)
    assert "2 things are wrong" in said
    assert "in this layout parallel.tp cannot be 8: " in said
    assert "in this layout zero_optimization.contiguous_gradients cannot be True: " in said


def test_a_configured_layout_that_could_never_run_is_refused_although_a_fallback_fits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp = 8"):
        run_of(tmp_path, 1, [{}], parallel={"tp": 8})


def test_too_few_processes_for_every_layout_are_told_what_each_takes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        pp_tp(tmp_path, 1, [{"tp": 2}, {"cp": 2}])
    assert "the configured layout takes 4, the fallbacks 2, 2" in str(caught.value)
    assert "start 2 or more processes" in str(caught.value)


@pytest.mark.parametrize("missing", ["train_batch_size", "train_micro_batch_size_per_gpu"])
def test_fallbacks_need_the_sizes_that_would_depend_on_the_layout(tmp_path: Path, missing: str) -> None:
    sizes: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, missing: None}
    with pytest.raises(ConfigError, match=rf"{missing}\n.*fallback_layouts"):
        run_of(tmp_path, 4, [{}], gradient_accumulation_steps=2, **sizes)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_configs_go_on_with_fewer_ranks_in_the_same_batches_and_curve(path: Path) -> None:
    config, curves = load_config(path), set()
    if path.stem.startswith(SMALL):
        worlds = range(1, 10)
    else:  # from what holds the model and its optimizer states in memory on: half of the listed number
        held = {"llama_70b_3d": 32, "llama_70b_fsdp_3d": 32, "llama_8b_64k_cp": 4, "qwen3_moe_30b": 8}
        least = {**held, "deepseek_v3_671b": 128}.get(path.stem, 1)
        worlds = range(least, 4 * least + 9)
    for processes in worlds:
        run = resolve(config, world_size=processes)
        assert run.batch.samples == config.train_batch_size
        assert run.batch.rows >= run.batch.samples
        assert run.batch.micro <= (config.train_micro_batch_size_per_gpu or 0)
        curves.add(json.dumps(curve_fields(run)))
    assert len(curves) == 1


def test_a_custom_loop_has_no_fallback_layouts() -> None:
    with pytest.raises(ConfigError, match=r"launch\.fallback_layouts\n.*whatever their number"):
        load_loop_config({"train_batch_size": 8, "launch": {"fallback_layouts": [{}]}})
