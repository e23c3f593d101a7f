"""Matching of hidden states and attention relations follows the same curve in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foundation.directory import read_manifest
from tests.conftest import launch, losses, write_config
from tests.engines.comparison import layout_params
from tests.run.distillation.test_features import BOTH
from tests.run.distillation.test_layouts import TOLERANCE, student

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "full activation checkpointing": (1, ("memory.activation_checkpointing=full",)),
    "FSDP2, teacher sharded": (2, ("distill.shard_teacher=true",)),
    "tensor parallelism": (2, ("parallel.tp=2", "zero_optimization.stage=2")),
    "context parallelism": (2, ("parallel.cp=2",)),
    "tensor and context parallelism, ring": (4, ("parallel.tp=2", "parallel.cp=2", "parallel.cp_method=ring")),
    "ZeRO-3": (2, ("engine=deepspeed",)),
    "ZeRO-2, tensor parallelism, selective checkpointing": (
        2,
        ("engine=deepspeed", "zero_optimization.stage=2", "parallel.tp=2", "memory.activation_checkpointing=selective"),
    ),
    "ZeRO-3, context parallelism, full checkpointing": (
        2,
        ("engine=deepspeed", "parallel.cp=2", "memory.activation_checkpointing=full"),
    ),
}
IN_CI = {
    "FSDP2, teacher sharded",
    "tensor and context parallelism, ring",
}
"""The others run with `make sweep-tests`."""


@pytest.fixture(scope="module")
def alone(teacher: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    work = tmp_path_factory.mktemp("alone")
    launch("distill.py", write_config(work / "c.json", student(tokens, work / "run", teacher, **BOTH)))
    rows = [json.loads(line) for line in (work / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    for row in steps:
        parts = 2 * row["kl"] + 0.5 * row["cross_entropy"] + 2 * row["hidden_states"] + 3 * row["attentions"]
        assert row["loss"] == pytest.approx(parts, rel=1e-5)
    return losses(work / "run")


@pytest.mark.parametrize("layout", layout_params(set(), LAYOUTS, integration=IN_CI))
def test_every_layout_follows_one_process(
    layout: str, alone: dict[int, float], teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    processes, sets = LAYOUTS[layout]
    config = write_config(tmp_path / "c.json", student(tokens, tmp_path / "run", teacher, **BOTH))
    launch("distill.py", config, *sets, processes=processes)
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=TOLERANCE)
    assert read_manifest(tmp_path / "run", kind="run").details["finished"]


PIPELINES: dict[str, tuple[str, ...]] = {
    "interleaved 1F1B": ("parallel.schedule=interleaved_1f1b", "zero_optimization.stage=2"),
    "zero bubble, full checkpointing": (
        "parallel.schedule=zero_bubble",
        "zero_optimization.stage=2",
        "memory.activation_checkpointing=full",
    ),
    "DeepSpeed": ("engine=deepspeed", "zero_optimization.stage=1"),
}


@pytest.fixture(scope="module")
def deep(tokens: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A student of four layers whose last is matched: its config, and the losses of one process."""
    work = tmp_path_factory.mktemp("deep")
    last = {"hidden_states": {"layers": {"3": 2}}, "attentions": {"layers": "last"}}
    config = student(tokens, work / "run", teacher, **last)
    config["model"]["config"]["num_hidden_layers"] = 4
    path = write_config(work / "c.json", config)
    launch("distill.py", path)
    return path, losses(work / "run")


@pytest.mark.parametrize("layout", layout_params(set(), PIPELINES, integration=PIPELINES.keys() - {"interleaved 1F1B"}))
def test_the_last_stages_layers_are_matched(layout: str, deep: tuple[Path, dict[int, float]], tmp_path: Path) -> None:
    sets = (f"run.dir={tmp_path / 'run'}", "parallel.pp=2", *PIPELINES[layout])
    launch("distill.py", deep[0], *sets, processes=2)
    assert losses(tmp_path / "run") == pytest.approx(deep[1], rel=TOLERANCE)
