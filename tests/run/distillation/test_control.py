"""The control of a distillation is the same run without a teacher, and the two are compared at the end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.base.directory import read_manifest
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import launch, losses, tiny_config, write_config
from tests.support import output_of
from tests.warm import run


def control(config: Path, *words: str) -> str:
    return output_of(run("-m", "pipeline", "distill", "--control", "--config", config, *words, merged=True))


@pytest.mark.integration
def test_the_control_is_the_run_of_headrace_train_without_a_teacher_and_both_losses_are_printed(
    teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    plain = tiny_config(tokens, tmp_path / "run", engine="torch")
    plain["run"] |= {"steps": 10, "checkpoint_every": 10}
    config = write_config(tmp_path / "c.json", {**plain, "distill": {"teacher": str(teacher)}})
    assert "distilled" not in control(config)  # there is nothing to compare with yet
    said = launch("distill.py", config)
    launch("train.py", write_config(tmp_path / "plain.json", plain), f"run.dir={tmp_path / 'plain'}")
    assert losses(tmp_path / "run-control") == losses(tmp_path / "plain")
    assert losses(tmp_path / "run") != losses(tmp_path / "plain")
    ends = [read_rows(tmp_path / name, kind="eval")[-1]["loss"] for name in ("run", "run-control")]
    distilled, controlled = re.findall(r"distilled (\d+\.\d+), control (\d+\.\d+)", said)[0]
    assert [float(distilled), float(controlled)] == pytest.approx(ends, abs=5e-5)
    assert "distill.teacher" not in read_manifest(tmp_path / "run-control", kind="run").parents
    assert json.loads((tmp_path / "run-control/manifest.json").read_text())["config"]["distill"] is None


def test_a_control_of_what_is_no_distillation_is_refused(tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch"))
    done = run("-m", "pipeline", "distill", "--control", "--config", config, merged=True)
    assert done.returncode == 2
    assert "--control" in done.stdout
    assert not (tmp_path / "run-control").exists()
