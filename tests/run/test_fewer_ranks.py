"""Shipped configs that lose a rank and get it back: 4 ranks, 3, and 4 again have the losses of 4 undisturbed ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

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
