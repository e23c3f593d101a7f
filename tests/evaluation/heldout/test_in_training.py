"""Evaluation during training with loss masks: targets of the mask count, and without any, training continues."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import launch, losses, start, tiny_config, write_config
from tests.data.test_opening import megatron
from tests.evaluation.heldout.small import make_masked
from tests.support import refusal_of


def no_heldout_targets(ids: np.ndarray, split: str) -> np.ndarray:
    return np.full(ids.size, split == "train")


@pytest.fixture(scope="module")
def nothing(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens whose held-out split has a loss mask without targets."""
    return make_masked(tmp_path_factory.mktemp("masked") / "nothing", tokens, no_heldout_targets)


def trained(work: Path, *paths: Path, processes: int = 1) -> tuple[Path, str]:
    """A run of eight steps with an evaluation after the fourth and the last: its directory, and what it output."""
    data = {"sources": [{"path": str(path)} for path in paths], "sequence_length": 32}
    run = {"dir": str(work / "run"), "steps": 8, "seed": 7}
    often = {"every": 4, "samples": 2}
    config = tiny_config(paths[0], work / "run", engine="torch", data=data, run=run, evaluation=often)
    output = launch("train.py", write_config(work / "c.json", config), processes=processes)
    assert set(losses(work / "run")) == set(range(1, 9))
    return work / "run", output


@pytest.mark.parametrize("processes", [1, 2])
def test_an_evaluation_without_targets_is_skipped_in_training(nothing: Path, tmp_path: Path, processes: int) -> None:
    run_dir, output = trained(tmp_path, nothing, processes=processes)
    skipped = [row for row in read_rows(run_dir, kind="event") if row["event"] == "no_targets"]
    assert [(row["step"], row["datasets"]) for row in skipped] == [(step, [f"{nothing}/heldout"]) for step in (4, 8)]
    assert output.count("the evaluation is skipped") == 2
    assert read_rows(run_dir, kind="eval") == []
    assert "finished" in output


def test_a_source_without_targets_is_not_part_of_the_mean(nothing: Path, tokens: Path, tmp_path: Path) -> None:
    run_dir, output = trained(tmp_path, tokens, nothing)
    found = read_rows(run_dir, kind="eval")
    assert [(row["step"], row["targets"]) for row in found] == [(4, 2 * 32), (8, 2 * 32)]  # the windows of the other
    assert all(np.isfinite(row["loss"]) and row["bits_per_byte"] > 0 for row in found)
    assert f"{nothing}/heldout: the means are of the others" in output


def test_sources_with_a_loss_mask_have_no_bits_per_byte_in_the_journal(masked: Path, tmp_path: Path) -> None:
    run_dir, output = trained(tmp_path, masked)
    found = read_rows(run_dir, kind="eval")
    assert [row["step"] for row in found] == [4, 8]
    assert all("bits_per_byte" not in row and 0 < row["targets"] < 2 * 32 for row in found)
    assert ", - bits per byte (" in output
    assert "null" not in json.dumps(found)


@pytest.mark.integration
@pytest.mark.parametrize("mask_documents", [True, False])
def test_the_command_finds_the_loss_of_the_last_evaluation_without_being_told_how(
    tokens: Path, masked: Path, tmp_path: Path, mask_documents: bool
) -> None:
    for number, path in enumerate((tokens, masked)):
        work = tmp_path / str(number)
        work.mkdir()
        data = {"sources": [{"path": str(path)}], "sequence_length": 48, "mask_documents": mask_documents}
        run = {"dir": str(work / "run"), "steps": 3, "seed": 7}
        sections = {"data": data, "run": run, "evaluation": {}, "scheduler": None}
        config = tiny_config(path, work / "run", engine="torch", zero_optimization={"stage": 0}, **sections)
        launch("train.py", write_config(work / "c.json", config))
        (row,) = read_rows(work / "run", kind="eval")
        for words in (("export", work / "run", work / "model"), ("eval", work / "model", "--data", path, "--json")):
            done = warm.run("-m", "pipeline", *words)
            assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["sequence_length"] == 48
        assert found["mask_documents"] is mask_documents
        assert found["tokens"] == row["targets"]
        assert found["loss_nats"] == pytest.approx(row["loss"], rel=1e-5)


def test_data_without_a_heldout_split_is_trained_on_when_the_config_says_no_evaluation(
    tokens: Path, tmp_path: Path
) -> None:
    megatron(tmp_path / "web", vocabulary=384)
    source = {"path": str(tmp_path / "web"), "tokenizer": str(tokens / "tokenizer")}
    config = tiny_config(tokens, tmp_path / "run", engine="torch", evaluation={"every": 2})
    config["data"]["sources"] = [source]
    config["run"]["steps"], config["scheduler"] = 3, None
    path = write_config(tmp_path / "c.json", config)
    assert "--set evaluation.samples=0" in refusal_of(start("train.py", path))
    launch("train.py", path, "evaluation.samples=0")
    assert set(losses(tmp_path / "run")) == {1, 2, 3}
    assert read_rows(tmp_path / "run", kind="eval") == []
    report = warm.run("-m", "pipeline", "report", tmp_path / "r.html", "--run", f"a={tmp_path / 'run'}", merged=True)
    assert report.returncode == 0, report.stdout
