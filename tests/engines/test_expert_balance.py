"""The balance of experts is that of the global batch: layouts of both engines follow one process, and exchange states.

Micro-batches of different sizes are among the layouts: a balance of the micro-batch would differ. The weight of the
auxiliary loss is 50 times the default, so that a missing one, or one of another scale, exceeds the tolerance 100-fold.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.models.routers import BIAS as BUFFER
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import launch, tiny_config, write_config
from tests.engines.comparison import (
    EXPERTS,
    FP32,
    LATENT,
    assert_within_tolerance,
    differences_fixture,
    layout,
    layout_params,
)

QWEN = {**EXPERTS, "tie_word_embeddings": True}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
DEEPSEEK = {**LATENT, "moe_intermediate_size": 32, "n_shared_experts": 1, "rope_interleave": False}
AUX = {"balance": "aux_loss", "aux_loss_coef": 0.5}
BIAS = {"balance": "bias", "bias_update_rate": 0.02}
RECOMPUTED = {"memory": {"activation_checkpointing": "full"}}


def balanced(stage: int, model: dict[str, Any] = QWEN, moe: dict[str, Any] = AUX, **keys: Any) -> dict[str, Any]:
    return layout(stage, model=model, moe=moe, **keys)


NATIVE = {
    "dp 2, stage 3": balanced(3, micro=2),
    "dp 2, Mixtral, accumulation 4": balanced(2, MIXTRAL, micro=1),
    "tp 2": balanced(3, micro=4, parallel={"tp": 2}),
    "pp 2, recomputed": {**balanced(2, micro=2, parallel={"pp": 2}), **RECOMPUTED},
    "pp 2, zero bubble": balanced(2, micro=2, parallel={"pp": 2, "schedule": "zero_bubble"}),
    "pp 2, Mixtral, interleaved": balanced(3, MIXTRAL, micro=2, parallel={"pp": 2, "schedule": "interleaved_1f1b"}),
    "cp 2": balanced(3, micro=2, parallel={"cp": 2}),
    "bias, dp 2": balanced(3, DEEPSEEK, BIAS, micro=2),
    "bias, pp 2": balanced(2, DEEPSEEK, BIAS, micro=2, parallel={"pp": 2}),
    "bias and auxiliary loss, dp 2": balanced(2, DEEPSEEK, {**BIAS, "aux_loss_coef": 0.5}, micro=2),
    "bf16": balanced(3, micro=2, bf16={"enabled": True}),
    "fp16, dp 2": balanced(3, micro=2, fp16={"enabled": True, "initial_scale_power": 22, "hysteresis": 1}),
}
DEEPSPEED = {
    "ZeRO-0": balanced(0, micro=2),
    "ZeRO-1": balanced(1, micro=2),
    "ZeRO-1, tp 2": balanced(1, micro=2, parallel={"tp": 2}),
    "ZeRO-2, cp 2, Mixtral": balanced(2, MIXTRAL, micro=2, parallel={"cp": 2}),
    "ZeRO-3, recomputed": {**balanced(3, micro=2), **RECOMPUTED},
    "ZeRO-1, pp 2": balanced(1, micro=2, parallel={"pp": 2}),
    "bias, ZeRO-3": balanced(3, DEEPSEEK, BIAS, micro=2),
    "bias, bf16, ZeRO-1": balanced(1, DEEPSEEK, BIAS, micro=2, bf16={"enabled": True}),
    "fp16, ZeRO-0": balanced(0, micro=2, fp16={"enabled": True, "initial_scale_power": 22, "hysteresis": 1}),
}
ALWAYS = {"pp 2, recomputed", "ZeRO-1"}
SWEPT = {
    "dp 2, Mixtral, accumulation 4",
    "tp 2",
    "bias, dp 2",
    "dp 2, stage 3",
    "pp 2, Mixtral, interleaved",
    "bias and auxiliary loss, dp 2",
    "bf16",
    "ZeRO-0",
    "ZeRO-2, cp 2, Mixtral",
    "bias, bf16, ZeRO-1",
    "fp16, ZeRO-0",
    "fp16, dp 2",
    "pp 2, zero bubble",
    "bias, pp 2",
    "ZeRO-1, tp 2",
    "ZeRO-1, pp 2",
    "cp 2",
    "ZeRO-3, recomputed",
}
"""Layouts for the sweep alone: each of their options is in another layout or in tests/parity, too."""
found = differences_fixture(
    "test_a_layout_balances_experts_as_one_process", {"torch": {2: NATIVE}, "deepspeed": {2: DEEPSPEED}}
)


@pytest.mark.integration
@pytest.mark.parametrize("name", layout_params(ALWAYS, NATIVE, DEEPSPEED, integration={*NATIVE, *DEEPSPEED} - SWEPT))
def test_a_layout_balances_experts_as_one_process(found: dict[str, dict[str, float]], name: str) -> None:
    assert_within_tolerance(found[name], name)
    # the load that is logged; a rounding to bf16 or fp16 moves single tokens
    assert found[name]["balance"] < (0.2 if "16" in name else FP32)


@pytest.mark.integration
def test_a_run_logs_the_load_resumes_identically_and_exports_its_biases(tokens: Path, tmp_path: Path) -> None:
    model = {"config": {**tiny_config(tokens, tmp_path)["model"]["config"], **DEEPSEEK}}
    config = tiny_config(tokens, tmp_path / "run", engine="torch", model=model, moe={**BIAS, "aux_loss_coef": 0.1})
    config["run"] |= {"steps": 6, "checkpoint_every": 3}
    config["scheduler"]["params"] = {"warmup_num_steps": 2, "decay_num_steps": 2}
    path = write_config(tmp_path / "run.json", config)
    launch("train.py", path, processes=2)
    rows_of = lambda: {row["step"]: row for row in read_rows(tmp_path / "run", kind="step")}  # noqa: E731
    rows = rows_of()
    assert {"load_balance_loss", "expert_max_violation", "expert_load_entropy", "idle_experts"} <= rows[6].keys()
    for newest in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(newest)
    launch("train.py", path, processes=1)
    for step, row in rows_of().items():
        for key in ("loss", "load_balance_loss", "expert_max_violation"):
            assert row[key] == pytest.approx(rows[step][key], rel=FP32), (step, key)
    assert warm.run("-m", "pipeline", "checkpoint", "verify", tmp_path / "run").returncode == 0
    assert warm.run("-m", "pipeline", "export", tmp_path / "run", tmp_path / "model").returncode == 0
    biases = [v for n, v in load_file(tmp_path / "model" / "model.safetensors").items() if n.endswith(BUFFER)]
    assert biases
    step = float(torch.tensor(0.02, dtype=biases[0].dtype))  # of the bias, as its dtype rounds it
    assert all(float(bias.abs().max()) >= step for bias in biases)
