"""The student samples the same tokens in every layout, and a killed run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.directory import read_manifest
from tests import warm
from tests.conftest import launch, losses, start, tiny_config, write_config
from tests.distillation.recorded_tokens import read

STEPS = 8
PROMPT, NEW = 9, 15
TOLERANCE = 2e-5
"""Relative, of fp32 losses: as in `test_layouts`."""

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "FSDP": (2, ("zero_optimization.stage=3",)),
    "data parallelism": (2, ("zero_optimization.stage=0",)),
    "tensor parallelism": (2, ("parallel.tp=2",)),
    "DeepSpeed, ZeRO-3": (2, ("engine=deepspeed", "zero_optimization.stage=3")),
    "DeepSpeed, ZeRO-1": (2, ("engine=deepspeed", "zero_optimization.stage=1")),
    "DeepSpeed, tensor parallelism": (2, ("engine=deepspeed", "zero_optimization.stage=2", "parallel.tp=2")),
    "one sample at a time, without a cache": (
        2,
        ("distill.on_policy.kv_cache=false", "distill.on_policy.batch=1", "distill.shard_teacher=true"),
    ),
    "the reference": (1, ("engine=reference", "zero_optimization.stage=0")),
}


def on_policy(tokens: Path, run_dir: Path, teacher: Path, **section: Any) -> dict[str, Any]:
    """A distillation of 8 steps of 8 samples, of which the student continues 3 each."""
    own = {"fraction": 0.375, "prompt_tokens": PROMPT, "new_tokens": NEW, **section}
    distill = {"teacher": str(teacher), "divergence": "reverse_kl", "alpha": 0.5, "on_policy": own}
    config = tiny_config(tokens, run_dir, engine="torch", distill=distill)
    config["run"] |= {"steps": STEPS, "checkpoint_every": 2}
    return config


def run(config: Path, folder: Path, *sets: str, processes: int = 1) -> None:
    """Distils, and writes the sampled tokens to a folder."""
    overrides = [word for each in sets for word in ("--set", each)]
    words = ("-m", "tests.distillation.recorded_tokens", folder, "--config", config, *overrides)
    done = warm.run(*words, processes=processes, merged=True)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="module", params=[False, True], ids=["contiguous", "documents"])
def alone(
    request: pytest.FixtureRequest, teacher: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[tuple[int, int], list[int]], dict[int, float]]:
    """The config, sampled tokens and losses of one process, with and without a document mask."""
    work = tmp_path_factory.mktemp("alone")
    config = on_policy(tokens, work / "run", teacher)
    config["data"]["mask_documents"] = request.param
    run(write_config(work / "c.json", config), work / "tokens")
    return config, read(work / "tokens"), losses(work / "run")


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_samples_the_same_tokens_and_follows_one_process(
    layout: str, alone: tuple[dict[str, Any], dict[tuple[int, int], list[int]], dict[int, float]], tmp_path: Path
) -> None:
    config, tokens, expected = alone
    processes, sets = LAYOUTS[layout]
    if layout == "the reference" and config["data"]["mask_documents"]:
        pytest.skip("it has no document mask")
    path = write_config(tmp_path / "c.json", config)
    run(path, tmp_path / "tokens", f"run.dir={tmp_path / 'run'}", *sets, processes=processes)
    assert len(tokens) == 3 * STEPS
    assert all(len(each) == NEW for each in tokens.values())
    assert read(tmp_path / "tokens") == tokens
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=TOLERANCE)
