"""Resumes with other ranks keep the losses; across engines they keep the optimizer state, or start it from zero."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.checkpoint.export.verify import verify_checkpoint
from pipeline.checkpoint.format.metadata import read_metadata
from tests.conftest import ROOT, launch, losses, start, tiny_config, write_config
from tests.engines.comparison import FP32
from tests.support import refusal_of

pytestmark = pytest.mark.integration
SMALL = (
    "data.sequence_length=32",
    "model.config.hidden_size=48",
    "model.config.intermediate_size=96",
    "run.steps=18",
    "run.checkpoint_every=3",
    "run.keep_checkpoints=9",
    "scheduler.params.warmup_num_steps=3",
    "evaluation.samples=8",
)


@pytest.mark.parametrize(
    ("name", "on_three"),
    [
        ("zero3.json", "dp 3 less 2 of 18 rows, which are padding"),
        pytest.param(
            "fsdp_3d.json",
            "dp 3; fallback layout 1 of 1, since 3 processes are there and the configured layout takes 4",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_a_lost_rank_is_done_without_and_comes_back(tokens: Path, tmp_path: Path, name: str, on_three: str) -> None:
    path = write_config(tmp_path / "c.json", {"extends": str(ROOT / "ds_configs" / name)})
    sets = (*SMALL, f"data.sources.0.path={tokens}", f"run.dir={tmp_path / 'run'}")
    begun = launch("train.py", path, *sets, processes=4)
    expected = losses(tmp_path / "run")
    lose_checkpoints_after(tmp_path / "run", 6)
    fewer = launch("train.py", path, *sets, processes=3)
    assert "resuming after step 6" in fewer
    assert on_three in fewer
    lose_checkpoints_after(tmp_path / "run", 12)
    again = launch("train.py", path, *sets, processes=4)
    assert "resuming after step 12" in again
    assert layout_line(again) == layout_line(begun)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(expected)
    for step, loss in losses(tmp_path / "run").items():
        assert loss == pytest.approx(expected[step], rel=FP32), step


def test_a_run_whose_micro_batch_was_derived_goes_on_with_three_ranks(tokens: Path, tmp_path: Path) -> None:
    config = tiny_config(tokens, tmp_path / "run", engine="torch", train_micro_batch_size_per_gpu="auto")
    path = write_config(tmp_path / "c.json", config)
    said = refusal_of(start("train.py", path, processes=3))
    assert "parallel.elastic true, which pads the batch, with a fixed train_micro_batch_size_per_gpu such as 2" in (
        said
    )
    launch("train.py", path, processes=2)
    expected = losses(tmp_path / "run")
    lose_checkpoints_after(tmp_path / "run", 15)
    assert "dp 3 less 1 of 9 rows, which are padding" in launch("train.py", path, processes=3)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=FP32)


def lose_checkpoints_after(run_dir: Path, step: int) -> None:
    """As if the run had been killed before it wrote them."""
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


def layout_line(output: str) -> str:
    """What the pre-flight check says about the layout, without its milliseconds."""
    return next(line for line in output.splitlines() if line.startswith("preflight")).partition("(")[0]


LION = {"type": "lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}}
MUON = {"type": "muon", "params": {"lr": 3e-3, "weight_decay": 0.1}}
SGD = {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}


def states(checkpoint: Path) -> set[str]:
    """The kinds of tensors in a checkpoint, and its scalars."""
    return {tensor.key.partition("/")[0] for tensor in read_metadata(checkpoint).tensors}


@pytest.mark.parametrize(
    ("optimizer", "kinds"),
    [
        pytest.param(LION, {"weight", "exp_avg"}, marks=pytest.mark.sweep),
        pytest.param(SGD, {"weight", "momentum_buffer"}, marks=pytest.mark.sweep),
        (MUON, {"weight", "momentum_buffer", "exp_avg", "exp_avg_sq", "optimizer_step"}),
    ],
    ids=["lion", "sgd", "muon"],
)
def test_a_checkpoint_of_one_engine_resumes_on_the_other_and_has_the_states_of_its_optimizer(
    tokens: Path, tmp_path: Path, optimizer: dict[str, Any], kinds: set[str]
) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", optimizer=optimizer))
    launch("train.py", config, "engine=torch", f"run.dir={tmp_path / 'reference'}")
    launch("train.py", config, "zero_optimization.stage=3", processes=2)
    shutil.copytree(tmp_path / "run", tmp_path / "last")
    shutil.rmtree(tmp_path / "last/checkpoints/step-00000020")
    output = launch("train.py", config, "engine=torch", f"run.dir={tmp_path / 'last'}", processes=2)
    assert "resuming after step 15" in output
    assert "starts at zero" not in output
    expected, sharded, resumed = (losses(tmp_path / name) for name in ("reference", "run", "last"))
    assert list(resumed) == list(range(1, 21))
    for step, loss in expected.items():
        assert [sharded[step], resumed[step]] == pytest.approx([loss, loss], rel=FP32), step
    assert expected[20] < 0.99 * expected[1]  # it trains
    for checkpoint in (tmp_path / "run/checkpoints/step-00000020", tmp_path / "last/checkpoints/step-00000020"):
        assert states(checkpoint) == kinds
        assert verify_checkpoint(Checkpoint(checkpoint, 20)) == []


def test_another_optimizer_is_refused_and_starts_from_zero_where_allowed(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    launch("train.py", config, "run.steps=10")
    lion = f"optimizer={json.dumps(LION)}"
    said = refusal_of(start("train.py", config, "run.steps=10", lion))
    assert "optimizer.type: was 'AdamW', now 'Lion'" in said
    starts = "the optimizer's state starts at zero: the checkpoint has a state of AdamW (exp_avg, exp_avg_sq), the run"
    assert starts in said
    assert 'run.allow_change: ["optimizer.params.lr", "optimizer.type"]' in said
    allow = 'run.allow_change=["optimizer.type", "optimizer.params.lr", "run.steps", "scheduler"]'
    output = launch("train.py", config, "run.steps=12", lion, allow, "scheduler=null")
    assert starts in output
    assert states(tmp_path / "run/checkpoints/step-00000012") == {"weight", "exp_avg"}
    # on from 12 with its own state: the change is not made again
    assert "starts at zero" not in launch("train.py", config, "run.steps=13", lion, allow, "scheduler=null")
    assert torch.isfinite(torch.tensor(losses(tmp_path / "run")[13]))


def test_momentum_that_is_switched_on_starts_from_zero(tokens: Path, tmp_path: Path) -> None:
    plain = {"type": "SGD", "params": {"lr": 0.1}}
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", optimizer=plain))
    launch("train.py", config, "run.steps=5", "scheduler=null")
    assert states(tmp_path / "run/checkpoints/step-00000005") == {"weight"}
    sets = ("run.steps=6", "scheduler=null", "optimizer.params.momentum=0.9")
    assert 'run.allow_change: ["optimizer.params.momentum"]' in refusal_of(start("train.py", config, *sets))
    output = launch("train.py", config, *sets, 'run.allow_change=["optimizer.params.momentum"]', processes=2)
    assert "has a state of SGD (no state), the run needs one of SGD (momentum_buffer)" in output
