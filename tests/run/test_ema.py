"""EMA of the weights: exact on every engine and layout, saved, resumed, evaluated beside the weights, exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from foundation.errors import ConfigError
from foundation.section import parse
from headrace.commands.app import run as headrace
from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.checkpoint.export.verify import verify_checkpoint
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.optimizers import EMA
from pipeline.config.sections.run import Config, EmaSection
from pipeline.data.micro_batch import IGNORE
from pipeline.engines.optim.weight_ema import attach_ema
from pipeline.run.batches import RankBatches
from pipeline.run.prepare import prepare
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import launch, losses, tiny_config, write_config
from tests.engines.comparison import FP32, HALF
from tests.engines.layout_cells import BF16, MOE, OPTIMIZER_ON_CPU, at, merged

DECAY, STEPS = 0.75, 5
# the scale doubles after every update until it overflows, and the rate is not 0: a veto comes after the first updates
FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 1, "hysteresis": 1},
    "scheduler": None,
    "optimizer": {"params": {"lr": 3e-4}},
}
ALWAYS = ("torch, tp 2", "deepspeed, ep 2, stage 2")
LAYOUTS = {
    "torch, tp 2": at(2, tp=2),
    "torch, tp 2, fp16": at(2, FP16, tp=2),
    "torch, ep 2": at(3, MOE, ep=2),
    "torch, fp16": at(3, FP16),
    "deepspeed, tp 2, stage 1": at(1, tp=2),
    "deepspeed, ep 2, stage 2": at(2, MOE, ep=2),
    "deepspeed, ep 2, fp16": at(0, MOE, FP16, ep=2),
    "deepspeed, ep 2, stage 3, optimizer on the cpu": at(3, MOE, OPTIMIZER_ON_CPU, ep=2),
    "deepspeed, stage 0, fp16": at(0, FP16),
    "deepspeed, stage 1, bf16, optimizer on the cpu": at(1, BF16, OPTIMIZER_ON_CPU),
    "deepspeed, stage 2, optimizer on the cpu": at(2, OPTIMIZER_ON_CPU),
    "deepspeed, stage 3, optimizer on the cpu": at(3, OPTIMIZER_ON_CPU),
}


def config_of(tokens: Path, run_dir: Path, **fields: Any) -> dict[str, Any]:
    config = tiny_config(tokens, run_dir, **{"engine": "torch", "zero_optimization": {"stage": 2}, **fields})
    config["model"]["config"]["tie_word_embeddings"] = True
    config["run"] |= {"steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 9, "ema": {"decay": DECAY}}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    config["evaluation"] = {"samples": 8, "every": 4}
    return config


def averages(run: Path, step: int) -> dict[str, Tensor]:
    return values_of(CheckpointWeights(checkpoint(run, step).path, ema=True))


def values_of(weights: CheckpointWeights) -> dict[str, Tensor]:
    return {name: weights.value(name) for name in weights.shapes}


def checkpoint(run: Path, step: int) -> Checkpoint:
    return Checkpoint(run / f"checkpoints/step-{step:08d}", step)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process in bf16, whose master weights are split."""
    work = tmp_path_factory.mktemp("ema")
    config = config_of(tokens, work / "run", bf16={"enabled": True})
    launch("train.py", write_config(work / "c.json", config))
    return work / "run"


@pytest.fixture(scope="module")
def sharded(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ZeRO-3 of DeepSpeed on two processes in fp32."""
    work = tmp_path_factory.mktemp("sharded")
    config = config_of(tokens, work / "run", engine="deepspeed", zero_optimization={"stage": 3})
    launch("train.py", write_config(work / "c.json", config), processes=2)
    return work / "run"


@pytest.mark.parametrize("name", ["run", "sharded"])
def test_the_average_of_every_checkpoint_is_the_recursion_to_the_bit(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    for step in range(2, STEPS + 1):
        weights, before = values_of(CheckpointWeights(checkpoint(run, step).path)), averages(run, step - 1)
        found = averages(run, step)
        assert found.keys() == weights.keys()
        wrong = [n for n in found if not torch.equal(found[n], torch.lerp(before[n], weights[n], 1 - DECAY))]
        assert wrong == []
    assert verify_checkpoint(checkpoint(run, STEPS)) == []


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.sweep) for n in LAYOUTS])
def test_averages_of_a_layout_are_the_recursion_and_those_of_one_process(
    name: str, tokens: Path, tmp_path: Path
) -> None:
    _, keys = LAYOUTS[name]
    run, one = tmp_path / "run", tmp_path / "one"
    config = merged(config_of(tokens, run, engine=name.split(",", maxsplit=1)[0]), {**keys, "model": {}})
    config["model"]["config"] |= keys.get("model", {})
    launch("train.py", write_config(tmp_path / "c.json", config), processes=2)
    alone = ("engine=torch", "parallel={}", "zero_optimization={}", f"run.dir={one}")
    launch("train.py", tmp_path / "c.json", *alone)
    vetoed, there = ({row["step"] for row in read_rows(each, kind="step") if row.get("skipped")} for each in (run, one))
    assert vetoed == there
    assert ("fp16" in keys) == bool(vetoed - {1})
    for step in range(2, STEPS + 1):
        weights, before = values_of(CheckpointWeights(checkpoint(run, step).path)), averages(run, step - 1)
        rate = 0.0 if step in vetoed else 1 - DECAY
        found, expected = averages(run, step), averages(one, step)
        assert found.keys() == expected.keys()
        wrong = [n for n in found if not torch.equal(found[n], torch.lerp(before[n], weights[n], rate))]
        assert wrong == []
        assert any(not torch.equal(before[n], weights[n]) for n in found) == (step > 2 or "fp16" in keys)
        error = max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in found)
        # gradients that are reduced in half precision are rounded twice, and Adam's first updates amplify it
        assert error < next((4 * HALF[kind] for kind in HALF if kind in keys), FP32)


def test_a_resumed_run_has_the_same_average_to_the_bit_and_evaluations_change_no_weight(
    run: Path, tokens: Path, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(run, tmp_path / "again", symlinks=True))
    for step in range(3, STEPS + 1):
        shutil.rmtree(checkpoint(again, step).path)
    launch("train.py", run.parent / "c.json", f"run.dir={again}")
    assert all(torch.equal(value, averages(run, STEPS)[name]) for name, value in averages(again, STEPS).items())
    plain = config_of(tokens, tmp_path / "plain", bf16={"enabled": True})
    plain["run"].pop("ema")
    launch("train.py", write_config(tmp_path / "p.json", plain))
    assert losses(tmp_path / "plain") == losses(run)
    resumed = launch("train.py", run.parent / "c.json", f"run.dir={tmp_path / 'plain'}", "run.steps=6")
    assert f"resuming after step {STEPS}" in resumed  # switched on: it begins with the weights
    weights = [values_of(CheckpointWeights(checkpoint(tmp_path / "plain", step).path)) for step in (STEPS, STEPS + 1)]
    for name, value in averages(tmp_path / "plain", STEPS + 1).items():
        assert torch.equal(value, torch.lerp(weights[0][name], weights[1][name], 1 - DECAY))


def test_an_average_goes_on_in_another_layout_of_the_other_engine(sharded: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(sharded, tmp_path / "other", symlinks=True))
    for step in range(3, STEPS + 1):
        shutil.rmtree(checkpoint(other, step).path)
    pipelined = ("engine=torch", "zero_optimization.stage=2", "parallel.pp=2")
    launch("train.py", sharded.parent / "c.json", f"run.dir={other}", *pipelined, processes=2)
    expected = averages(sharded, STEPS)
    for name, value in averages(other, STEPS).items():
        assert torch.allclose(value, expected[name], rtol=1e-3, atol=1e-5), name
    rows = [[row["ema_loss"] for row in read_rows(each, kind="eval")] for each in (other, sharded)]
    assert rows[0] == pytest.approx(rows[1], rel=FP32)
    assert len(rows[0]) == 2


def test_the_exported_average_has_the_loss_that_was_evaluated_beside_the_run(sharded: Path, tmp_path: Path) -> None:
    assert headrace(["export", str(sharded), str(tmp_path / "model"), "--ema"]) == 0
    row = list(read_rows(sharded, kind="eval"))[-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    config = parse(Config, json.loads((sharded.parent / "c.json").read_text()))
    batches = RankBatches(prepare(resolve(config, world_size=1)), 0)
    nats, targets = torch.zeros(()), 0
    with torch.no_grad():
        for batch in batches.evaluation(batches.heldout[0]):
            logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)
            nats += cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")
            targets += int((batch.labels != IGNORE).sum())
    assert float(nats) / targets == pytest.approx(row["ema_loss"], rel=FP32)
    assert row["ema_loss"] != pytest.approx(row["loss"], rel=1e-3)


@pytest.mark.parametrize("vetoed", [None, 0.0, 1.0])
def test_a_vetoed_update_leaves_the_average(vetoed: float | None) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer: Any = torch.optim.SGD([weight], lr=0.5)
    optimizer.state[weight][EMA] = torch.zeros(3)
    attach_ema(optimizer, EmaSection(decay=DECAY))
    weight.grad = torch.zeros(3)
    if vetoed is not None:
        optimizer.found_inf = torch.tensor(vetoed)
    torch.optim.Optimizer.profile_hook_step(lambda _self: None)(optimizer)  # the hooks of a step that changes nothing
    assert optimizer.state[weight][EMA].tolist() == [0.0 if vetoed else 1 - DECAY] * 3


def refused() -> Iterator[dict[str, Any]]:
    nvme = {"device": "nvme", "nvme_path": "/tmp"}
    yield {"engine": "deepspeed", "zero_optimization": {"stage": 3, "offload_optimizer": nvme}}
    yield {"replicas": {"count": 2}}


def test_nvme_and_groups_are_refused_and_a_plan_counts_four_bytes(tokens: Path, tmp_path: Path) -> None:
    for fields in refused():
        with pytest.raises(ConfigError, match=r"run\.ema"):
            resolve(parse(Config, config_of(tokens, tmp_path / "run", **fields)), world_size=1)
    config = config_of(tokens, tmp_path / "run")
    with_ema = resolve(parse(Config, config), world_size=1)
    config["run"].pop("ema")
    without = resolve(parse(Config, config), world_size=1)
    assert with_ema.held_bytes_per_parameter == (without.held_bytes_per_parameter or 0) + 4
    assert with_ema.config.state_kind.bytes_per_parameter == without.config.state_kind.bytes_per_parameter + 4
