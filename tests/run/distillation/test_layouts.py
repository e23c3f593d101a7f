"""A distillation follows the same curve in every layout of student and teacher."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foundation.directory import read_manifest
from tests import warm
from tests.conftest import launch, losses, tiny_config, write_config
from tests.engines.comparison import EXPERTS, layout_params
from tests.support import output_of

STEPS = 8
TOLERANCE = 2e-5
"""Relative, of fp32 losses: another order of summation was seen to differ by up to 3e-6."""

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tensor parallelism": (2, ("parallel.tp=2",)),
    "context parallelism": (2, ("parallel.cp=2",)),
    "teacher sharded": (2, ("distill.shard_teacher=true",)),
    "pipeline": (2, ("parallel.pp=2", "zero_optimization.stage=2")),
    "DeepSpeed, pipeline": (2, ("engine=deepspeed", "parallel.pp=2", "zero_optimization.stage=1")),
    "DeepSpeed, pipeline, teacher sharded": (
        4,
        ("engine=deepspeed", "parallel.pp=2", "zero_optimization.stage=1", "distill.shard_teacher=true"),
    ),
    "DeepSpeed, pipeline, tensor parallelism": (
        4,
        ("engine=deepspeed", "parallel.pp=2", "parallel.tp=2", "zero_optimization.stage=0"),
    ),
    "DeepSpeed, tensor parallelism": (2, ("engine=deepspeed", "zero_optimization.stage=2", "parallel.tp=2")),
    "DeepSpeed, teacher sharded": (2, ("engine=deepspeed", "distill.shard_teacher=true")),
    "tp, cp and a sharded teacher": (4, ("parallel.tp=2", "parallel.cp=2", "distill.shard_teacher=true")),
}
IN_CI = {
    "pipeline",
    "DeepSpeed, tensor parallelism",
    "DeepSpeed, teacher sharded",
    "tp, cp and a sharded teacher",
}
"""The others run with `make sweep-tests`."""


def student(tokens: Path, run_dir: Path, teacher: Path, **distill: Any) -> dict[str, Any]:
    section = {"teacher": str(teacher), "temperature": 2.0, "alpha": 0.5, **distill}
    config = tiny_config(tokens, run_dir, engine="torch", distill=section)
    config["data"]["mask_documents"] = True
    config["run"] |= {"steps": STEPS, "checkpoint_every": STEPS}
    return config


@pytest.fixture(scope="module")
def expected(teacher: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    work = tmp_path_factory.mktemp("alone")
    launch("distill.py", write_config(work / "c.json", student(tokens, work / "run", teacher, divergence="jsd")))
    return losses(work / "run")


@pytest.mark.parametrize("layout", layout_params(set(), LAYOUTS, integration=IN_CI))
def test_every_layout_of_student_and_teacher_follows_one_process(
    layout: str, expected: dict[int, float], teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    processes, sets = LAYOUTS[layout]
    config = write_config(tmp_path / "c.json", student(tokens, tmp_path / "run", teacher, divergence="jsd"))
    launch("distill.py", config, *sets, processes=processes)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=TOLERANCE)
    assert read_manifest(tmp_path / "run", kind="run").details["finished"]


@pytest.mark.integration
@pytest.mark.parametrize("experts", [False, True])
def test_a_student_with_expert_parallelism_follows_one_process(
    experts: bool, teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    """The teacher is dense, or has experts, too, and keeps all of them on every rank."""
    config = student(tokens, tmp_path / "alone", tmp_path / "teacher" if experts else teacher)
    config["model"]["config"] |= EXPERTS
    if experts:
        torch.manual_seed(5)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config["model"]["config"], vocab_size=512))
        made.save_pretrained(tmp_path / "teacher")
        for path in teacher.glob("token*"):
            shutil.copy(path, tmp_path / "teacher")
    path = write_config(tmp_path / "c.json", config)
    launch("distill.py", path, processes=1)
    launch("distill.py", path, "parallel.ep=2", f"run.dir={tmp_path / 'ep'}", processes=2)
    assert losses(tmp_path / "ep") == pytest.approx(losses(tmp_path / "alone"), rel=TOLERANCE)


SHARE = """
import sys
import torch
import torch.distributed as dist
from pipeline.config.load import read_config
from pipeline.config.rules.resolve import resolve
from pipeline.data.mixture import open_mixture
from pipeline.data.loader import StepLoader
from pipeline.run.distillation.teacher import Teacher
from pipeline.engines.parallel.mesh import build_mesh
from pipeline.run.distillation.find_teacher import open_teacher

dist.init_process_group("gloo")
run = resolve(read_config(sys.argv[1], ["distill.shard_teacher=true"]).config, world_size=2)
mesh = build_mesh(run.topology, device_type="cpu", shard_size=run.shard_size)
teacher = Teacher(open_teacher(run, vocab_size=512), run, device=torch.device("cpu"), mesh=mesh)
decoder, head = teacher._made
loader = StepLoader(open_mixture(run.config.data, seed=7), run.batch, dp_rank=dist.get_rank(), steps=(1, 1))
for _ in range(2):
    teacher.targets(loader.gather(1).micro_batches[0])
    layers = [p.to_local().numel() for n, p in decoder.causal.named_parameters() if ".layers." in n]
    whole = [p.numel() for n, p in decoder.causal.named_parameters() if ".layers." in n]
    if dist.get_rank() == 0:
        print(sum(layers), sum(whole), type(head.weight.data).__name__)
dist.destroy_process_group()
"""


def test_between_passes_a_rank_has_its_share_of_the_teacher(teacher: Path, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", student(tokens, tmp_path / "run", teacher))
    lines = [line.split() for line in output_of(warm.run("-c", SHARE, config, processes=2)).splitlines()]
    assert len(lines) == 2
    for own, whole, head in lines:
        assert 2 * int(own) == int(whole)
        assert head == "Tensor"
