"""Keys of communication: where they are taken, and that they are refused with what to use instead elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import ConfigError
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.engines.deepspeed.config import deepspeed_config

HPZ, REDUCED = "zero_optimization.zero_hpz_partition_size", "communication_data_type"


def resolved(work: Path, *overrides: str, processes: int = 8) -> ResolvedRun:
    """A run of a small model."""
    config: dict[str, Any] = {
        "model": {"config": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}},
        "data": {"sources": [{"path": "none"}], "sequence_length": 32},
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
        "run": {"dir": "none", "steps": 20},
    }
    path = work / "config.json"
    path.write_text(json.dumps(config))
    return resolve(load_config(str(path), list(overrides)), world_size=processes)


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_reduced_in_bf16_where_they_are_accumulated_in_fp32(
    tmp_path: Path, engine: str, stage: int
) -> None:
    keys = [f"engine={engine}", f"zero_optimization.stage={stage}", "bf16.enabled=true", f"{REDUCED}=bf16"]
    run = resolved(tmp_path, *keys)
    assert deepspeed_config(run)[REDUCED] == "bf16"
    assert deepspeed_config(resolved(tmp_path, *keys[:3]))[REDUCED] == "fp32"


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
        resolved(tmp_path, *keys, f"{REDUCED}=bf16")


def test_one_micro_batch_per_step_may_be_reduced_in_bf16_anywhere(tmp_path: Path) -> None:
    keys = ["engine=torch", "zero_optimization.stage=0", "bf16.enabled=true", f"{REDUCED}=bf16"]
    assert resolved(tmp_path, *keys, "train_batch_size=8").batch.accumulation == 1


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_secondary_shards_are_taken_by_both_engines_at_stage_3(tmp_path: Path, engine: str) -> None:
    run = resolved(tmp_path, f"engine={engine}", "zero_optimization.stage=3", f"{HPZ}=4")
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
        resolved(tmp_path, "engine=torch", *keys)


@pytest.mark.parametrize(
    ("key", "instead"), [("zero_quantized_weights", "fp8.fsdp_all_gather"), ("zero_quantized_gradients", REDUCED)]
)
def test_int8_communication_is_refused_with_what_works_instead(tmp_path: Path, key: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        resolved(tmp_path, "zero_optimization.stage=3", f"zero_optimization.{key}=true")


def test_overlap_is_left_to_deepspeed_and_offload_is_to_page_locked_memory(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: PLC0415  imports for seconds

    for stage in (2, 3):
        keys = (f"zero_optimization.stage={stage}", "zero_optimization.offload_optimizer.device=cpu")
        section = deepspeed_config(resolved(tmp_path, *keys))["zero_optimization"]
        assert DeepSpeedZeroConfig(**section).overlap_comm is (stage == 3)
        assert section["offload_optimizer"]["pin_memory"] is True
