"""Evaluations of a run on tokens with loss masks: what is learnt counts, and where nothing is, training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.metrics.journal import read_rows
from tests.conftest import launch, losses, tiny_config, write_config
from tests.evaluation.small import make_masked


def heldout_is_not_learnt(ids: np.ndarray, split: str) -> np.ndarray:
    return np.full(ids.size, split == "train")


@pytest.fixture(scope="module")
def nothing(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of whose held-out split nothing is learnt."""
    return make_masked(tmp_path_factory.mktemp("masked") / "nothing", tokens, heldout_is_not_learnt)


def trained(work: Path, *paths: Path, processes: int = 1) -> tuple[Path, str]:
    """A run of eight steps with an evaluation after the fourth and the last: its directory, and what it said."""
    data = {"sources": [{"path": str(path)} for path in paths], "sequence_length": 32}
    run = {"dir": str(work / "run"), "steps": 8, "seed": 7}
    often = {"every": 4, "samples": 2}
    config = tiny_config(paths[0], work / "run", engine="torch", data=data, run=run, evaluation=often)
    said = launch("train.py", write_config(work / "c.json", config), processes=processes)
    assert set(losses(work / "run")) == set(range(1, 9))
    return work / "run", said


@pytest.mark.parametrize("processes", [1, 2])
def test_an_evaluation_without_targets_is_skipped_and_training_goes_on(
    nothing: Path, tmp_path: Path, processes: int
) -> None:
    run_dir, said = trained(tmp_path, nothing, processes=processes)
    left_out = [row for row in read_rows(run_dir, kind="event") if row["event"] == "no_targets"]
    assert [(row["step"], row["datasets"]) for row in left_out] == [(step, [f"{nothing}/heldout"]) for step in (4, 8)]
    assert said.count("the evaluation is skipped") == 2
    assert read_rows(run_dir, kind="eval") == []
    assert "finished" in said


def test_a_source_without_targets_is_left_out_of_the_means(nothing: Path, tokens: Path, tmp_path: Path) -> None:
    run_dir, said = trained(tmp_path, tokens, nothing)
    found = read_rows(run_dir, kind="eval")
    assert [(row["step"], row["targets"]) for row in found] == [(4, 2 * 32), (8, 2 * 32)]  # the windows of the other
    assert all(np.isfinite(row["loss"]) and row["bits_per_byte"] > 0 for row in found)
    assert f"{nothing}/heldout: the means are of the others" in said


def test_masked_sources_have_no_bits_per_byte_in_the_journal(masked: Path, tmp_path: Path) -> None:
    run_dir, said = trained(tmp_path, masked)
    found = read_rows(run_dir, kind="eval")
    assert [row["step"] for row in found] == [4, 8]
    assert all("bits_per_byte" not in row and 0 < row["targets"] < 2 * 32 for row in found)
    assert ", - bits per byte (" in said
    assert "null" not in json.dumps(found)
