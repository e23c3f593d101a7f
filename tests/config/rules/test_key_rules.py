"""Keys of communication, of pipeline ranks' devices and of parametrization: where they are taken, where refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.rules.curve import curve_fields
from pipeline.config.rules.resolve import resolve
from pipeline.config.rules.stage_devices import StageDevices
from pipeline.config.sections.run import Config
from pipeline.engines.deepspeed.config import deepspeed_config
from tests.config.rules.test_rules import resolved

HPZ, REDUCED = "zero_optimization.zero_hpz_partition_size", "communication_data_type"
on_eight = partial(resolved, world_size=8, train_batch_size=16, train_micro_batch_size_per_gpu=1)


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_reduced_in_bf16_where_they_are_accumulated_in_fp32(
    tmp_path: Path, engine: str, stage: int
) -> None:
    keys = [f"engine={engine}", f"zero_optimization.stage={stage}", "bf16.enabled=true", f"{REDUCED}=bf16"]
    run = on_eight(tmp_path, *keys)
    assert deepspeed_config(run)[REDUCED] == "bf16"
    assert deepspeed_config(on_eight(tmp_path, *keys[:3]))[REDUCED] == "fp32"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["engine=torch", "zero_optimization.stage=3"], "the run is not bf16"),
        (
            ["engine=deepspeed", "zero_optimization.stage=1", "bf16.enabled=true"],
            "accumulated in fp32, and reduced in it",
        ),
        (["engine=torch", "zero_optimization.stage=0", "bf16.enabled=true"], "use stage 2 or 3, or one micro-batch"),
        (
            ["engine=torch", "zero_optimization.stage=2", "bf16.enabled=true", "parallel.pp=2"],
            "use zero_optimization.stage 3",
        ),
        (
            ["engine=torch", "zero_optimization.stage=3", "bf16.enabled=true", "parallel.hybrid_shard_size=4"],
            "are summed before they are reduced",
        ),
    ],
)
def test_gradients_reduced_in_bf16_are_refused_where_bf16_would_be_accumulated_or_not_sent(
    tmp_path: Path, keys: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        on_eight(tmp_path, *keys, f"{REDUCED}=bf16")


def test_one_micro_batch_per_step_may_be_reduced_in_bf16_anywhere(tmp_path: Path) -> None:
    keys = ["engine=torch", "zero_optimization.stage=0", "bf16.enabled=true", f"{REDUCED}=bf16"]
    assert on_eight(tmp_path, *keys, "train_batch_size=8").batch.accumulation == 1


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_secondary_shards_are_taken_by_both_engines_at_stage_3(tmp_path: Path, engine: str) -> None:
    run = on_eight(tmp_path, f"engine={engine}", "zero_optimization.stage=3", f"{HPZ}=4")
    assert deepspeed_config(run)["zero_optimization"]["zero_hpz_partition_size"] == 4


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["zero_optimization.stage=2", f"{HPZ}=4"], "or use zero_optimization.stage 3"),
        (["zero_optimization.stage=3", f"{HPZ}=3"], "use 2, or remove it"),
        (["zero_optimization.stage=3", f"{HPZ}=8"], "use 4, or remove it"),
        (["zero_optimization.stage=3", f"{HPZ}=2", "parallel.hybrid_shard_size=4"], "do not combine"),
        (["zero_optimization.stage=3", f"{HPZ}=2", "parallel.tp=2", "engine=deepspeed"], "or use engine torch"),
    ],
)
def test_secondary_shards_that_do_not_fit_are_refused(tmp_path: Path, keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        on_eight(tmp_path, "engine=torch", *keys)


@pytest.mark.parametrize(
    ("key", "instead"), [("zero_quantized_weights", "fp8.fsdp_all_gather"), ("zero_quantized_gradients", REDUCED)]
)
def test_int8_communication_is_refused_with_what_works_instead(tmp_path: Path, key: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        on_eight(tmp_path, "zero_optimization.stage=3", f"zero_optimization.{key}=true")


def test_overlap_is_left_to_deepspeed_and_offload_is_to_page_locked_memory(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: PLC0415  imports for seconds

    for stage in (2, 3):
        keys = (f"zero_optimization.stage={stage}", "zero_optimization.offload_optimizer.device=cpu")
        section = deepspeed_config(on_eight(tmp_path, *keys))["zero_optimization"]
        assert DeepSpeedZeroConfig(**section).overlap_comm is (stage == 3)
        assert section["offload_optimizer"]["pin_memory"] is True


MICRO_BATCHES = {"engine": "torch", "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
pipelined = partial(resolved, world_size=2, **MICRO_BATCHES)


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
        pipelined(tmp_path, parallel=parallel)
    assert refused.value.field == field


def test_measured_speeds_are_refused_where_every_island_would_divide_the_layers_differently(tmp_path: Path) -> None:
    islands = {"name": "a", "steps": 2, "lighthouse": "127.0.0.1:29510"}
    with pytest.raises(ConfigError, match="the same list of speeds on every island"):
        pipelined(tmp_path, parallel={"pp": 2, "stage_speeds": "measured"}, islands=islands)
    assert pipelined(tmp_path, parallel={"pp": 2, "stage_speeds": [2, 1]}, islands=islands).topology.pp == 2


def test_a_fallback_layout_has_speeds_of_its_own(tmp_path: Path) -> None:
    launch = {"fallback_layouts": [{"pp": 2, "stage_speeds": [3, 1]}, {}]}
    four = {"pp": 4, "stage_speeds": [1, 1, 1, 2], "stage_memory_gb": [1, 1, 1, 2]}
    run = pipelined(tmp_path, world_size=4, parallel=four, launch=launch)
    assert run.stage_devices == StageDevices((1, 1, 1, 2), (1e9, 1e9, 1e9, 2e9))
    assert pipelined(tmp_path, world_size=2, parallel=four, launch=launch).stage_devices == StageDevices((3, 1))
    assert pipelined(tmp_path, world_size=1, parallel=four, launch=launch).stage_devices == StageDevices((1,))


COMPLETEP = {"parametrization": "completep", "base": {"hidden_size": 64, "num_hidden_layers": 2}}


def config(model: dict[str, Any], **changes: Any) -> Config:
    raw: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}, **model},
        "data": {"sources": [{"path": "tokens"}], "sequence_length": 16},
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "run": {"dir": "run", "steps": 2},
    }
    return parse(Config, {**raw, **changes})


@pytest.mark.parametrize(
    ("model", "changes", "field"),
    [
        ({"parametrization": "completep"}, {}, "model.base"),
        ({"parametrization": "completep", "base": {}}, {}, "model.base"),
        ({"base": {"hidden_size": 64}}, {}, "model.base"),
        (COMPLETEP, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "optimizer.type"),
        ({**COMPLETEP, "config": None, "path": "model", "keep_layers": [0]}, {}, "model.keep_layers"),
    ],
)
def test_what_does_not_go_together_is_refused(model: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config(model, **changes), world_size=1)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["Lion", "Muon"])
def test_optimizers_whose_steps_do_not_grow_with_the_gradient_are_taken(kind: str) -> None:
    optimizer = {"type": kind, "params": {"lr": 1e-4}}
    assert resolve(config(COMPLETEP, optimizer=optimizer), world_size=1).config.model.base is not None


def test_the_base_model_is_part_of_the_curve_and_absent_without() -> None:
    with_base, plain = (curve_fields(resolve(config(each), world_size=1))["model"] for each in (COMPLETEP, {}))
    assert (with_base["parametrization"], with_base["base"]) == ("completep", COMPLETEP["base"])
    assert (plain["parametrization"], plain["base"]) == (None, None)
