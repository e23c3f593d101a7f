"""A distillation follows the same curve in every layout of student and teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.directory import read_manifest
from tests.conftest import launch, losses, tiny_config, write_config

STEPS = 8
TOLERANCE = 2e-5
"""Relative, of fp32 losses: another order of summation was seen to differ by up to 3e-6."""

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tensor parallelism": (2, ("parallel.tp=2",)),
    "context parallelism": (2, ("parallel.cp=2",)),
    "teacher sharded": (2, ("distill.shard_teacher=true",)),
    "pipeline": (2, ("parallel.pp=2", "zero_optimization.stage=2")),
    "DeepSpeed, tensor parallelism": (2, ("engine=deepspeed", "zero_optimization.stage=2", "parallel.tp=2")),
    "DeepSpeed, teacher sharded": (2, ("engine=deepspeed", "distill.shard_teacher=true")),
    "tp, cp and a sharded teacher": (4, ("parallel.tp=2", "parallel.cp=2", "distill.shard_teacher=true")),
}


def student(tokens: Path, run_dir: Path, teacher: Path, **distill: Any) -> dict[str, Any]:
    """A distillation of 8 steps on documents apart."""
    section = {"teacher": str(teacher), "temperature": 2.0, "alpha": 0.5, **distill}
    config = tiny_config(tokens, run_dir, engine="torch", distill=section)
    config["data"]["mask_documents"] = True
    config["run"] |= {"steps": STEPS, "checkpoint_every": STEPS}
    return config


@pytest.fixture(scope="module")
def expected(teacher: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process."""
    work = tmp_path_factory.mktemp("alone")
    launch("distill.py", write_config(work / "c.json", student(tokens, work / "run", teacher, divergence="jsd")))
    return losses(work / "run")


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_student_and_teacher_follows_one_process(
    layout: str, expected: dict[int, float], teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    processes, sets = LAYOUTS[layout]
    config = write_config(tmp_path / "c.json", student(tokens, tmp_path / "run", teacher, divergence="jsd"))
    launch("distill.py", config, *sets, processes=processes)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=TOLERANCE)
    assert read_manifest(tmp_path / "run", kind="run").details["finished"]
