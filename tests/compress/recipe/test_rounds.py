"""Iterative pruning with distillation between (`headrace compress run`): killed between rounds, it goes on.

All of its processes are killed with SIGKILL while the second pruning writes, and while the second distillation trains;
what the steps before have made is not made again.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundation.directory import read_manifest, staging_path
from pipeline.models.folder.model_folder import ModelFolder
from tests.compress.recipe.test_recipe import run, started
from tests.conftest import tiny_config, write_config
from tests.evaluation.heldout.small import SEQUENCE, make_model, make_tokens
from tests.support import wait_until

MADE = ("pruned-1", "distilled-1", "pruned-2", "distilled-2")
ROUNDS = [
    {"target": {"shape": {"num_hidden_layers": 1}}, "calibration": {"samples": 8}},
    {"target": {"shape": {"intermediate_size": 32}}, "calibration": {"samples": 8}},
]


def write_recipe(work: Path, output: str) -> Path:
    fields: dict[str, Any] = {
        "model": str(work / "model"),
        "output": str(work / output),
        "data": {"path": str(work / "tokens"), "sequence_length": SEQUENCE},
        "prune": [{**each, "consumers": []} for each in ROUNDS],
        "distill": {"config": str(work / "student.json")},
    }
    return write_config(work / f"{output}.json", fields)


def kill_when(path: Path, reached: Callable[[], bool]) -> None:
    process = started(path)
    wait_until(reached, process=process, said=lambda: process.communicate()[0])
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def written(output: Path) -> dict[str, int]:
    """Name -> when its manifest was written, of the models that are whole."""
    return {name: (output / name / "manifest.json").stat().st_mtime_ns for name in MADE if (output / name).exists()}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounds")
    tokens = make_tokens(folder / "tokens")
    make_model(folder / "model", tokens, tied=False)
    student = tiny_config(tokens, folder / "unused", engine="torch")
    student["model"] = {"config": "auto", "path": "set by the recipe"}
    student["zero_optimization"] = {"stage": 0}
    student["run"] |= {"steps": 40, "checkpoint_every": 10}
    write_config(folder / "student.json", student)
    return folder


@pytest.mark.sweep
def test_two_rounds_killed_between_and_within_go_on_where_they_were_and_make_nothing_twice(work: Path) -> None:
    path, output = write_recipe(work, "killed"), work / "killed"
    kill_when(path, lambda: staging_path(output / "pruned-2").exists() or (output / "pruned-2").exists())
    before = written(output)
    assert {"pruned-1", "distilled-1"} <= before.keys()
    steps = output / "runs/distillation-2/checkpoints"
    kill_when(path, lambda: steps.is_dir() and any(steps.glob("step-*")))
    assert before.items() <= written(output).items()  # nothing was made again
    assert not (output / "distilled-2").exists()
    code, text = run(path)
    assert code == 0, text
    assert text.count("done before") == 4, text  # pruned-1, distillation-1, distilled-1, pruned-2
    assert before.items() <= written(output).items()
    _check_lineage(work, output)


def _check_lineage(work: Path, output: Path) -> None:
    """Each step is made of the one before, and every teacher is the original."""
    sizes = [ModelFolder.open(output / name).parameters for name in MADE]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3]
    first, second = (read_manifest(output / name, kind="model") for name in ("pruned-1", "pruned-2"))
    assert first.parents["model"]["path"] == str(work / "model")
    assert second.parents["model"]["fingerprint"] == read_manifest(output / "distilled-1", kind="model").fingerprint
    for number in (1, 2):
        config = json.loads((output / f"configs/distillation-{number}.json").read_text())
        assert config["distill"]["teacher"] == str(work / "model")
    lineage = json.dumps(read_manifest(output / "distilled-2", kind="model").details)
    assert lineage.count("pruning") >= 2
