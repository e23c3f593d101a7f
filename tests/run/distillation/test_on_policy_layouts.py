"""The student samples the same tokens in every layout, and a killed run goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from foundation.directory import read_manifest
from pipeline.runtime.launch.group import free_port
from pipeline.runtime.metrics.journal import read_rows
from tests import warm
from tests.conftest import ROOT, losses, tiny_config, write_config
from tests.engines.comparison import layout_params
from tests.run.distillation.recorded_tokens import read
from tests.support import output_of
from tests.warm_python import python, real_pid

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
IN_CI = {"tensor parallelism", "DeepSpeed, ZeRO-3"}
"""The others run with `make sweep-tests`."""


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
    words = ("-m", "tests.run.distillation.recorded_tokens", folder, "--config", config, *overrides)
    output_of(warm.run(*words, processes=processes, merged=True))


DOCUMENTS = pytest.param(True, id="documents", marks=pytest.mark.sweep)  # test_generation.py has the mask in CI


@pytest.fixture(scope="module", params=[pytest.param(False, id="contiguous"), DOCUMENTS])
def alone(
    request: pytest.FixtureRequest, teacher: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[tuple[int, int], list[int]], dict[int, float]]:
    """The config, sampled tokens and losses of one process, with and without a document mask."""
    work = tmp_path_factory.mktemp("alone")
    config = on_policy(tokens, work / "run", teacher)
    config["data"]["mask_documents"] = request.param
    run(write_config(work / "c.json", config), work / "tokens")
    return config, read(work / "tokens"), losses(work / "run")


@pytest.mark.parametrize("layout", layout_params(set(), LAYOUTS, integration=IN_CI))
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


@pytest.mark.integration
@pytest.mark.sweep
def test_a_rank_without_a_sample_makes_the_passes_of_others(teacher: Path, tokens: Path, tmp_path: Path) -> None:
    made = {}
    for processes, extra in ((1, ()), (4, ("compile.enabled=true", "compile.backend=eager"))):
        few = on_policy(tokens, tmp_path / str(processes), teacher, fraction=0.125)
        few["memory"] = {"activation_checkpointing": "full"}
        path = write_config(tmp_path / f"{processes}.json", few)
        run(path, tmp_path / f"tokens-{processes}", *extra, processes=processes)
        made[processes] = read(tmp_path / f"tokens-{processes}")
    assert len(made[1]) == STEPS  # one sample each: three ranks of four have none
    assert made[4] == made[1]


LONGER = ("run.steps=24", "run.checkpoint_every=4")


def kill_after(step: int, run_dir: Path, words: list[str]) -> None:
    """Starts two ranks, and kills both with SIGKILL when the journal has a step."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [python(), *words],
            cwd=ROOT,
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    while not (run_dir / "metrics.jsonl").exists() or step not in losses(run_dir, written=False):
        assert all(rank.poll() is None for rank in ranks), "the run ended before it could be killed"
        time.sleep(0.01)
    for rank in ranks:
        os.kill(real_pid(rank.pid), signal.SIGKILL)
    for rank in ranks:
        rank.wait()


@pytest.mark.sweep
def test_a_run_killed_with_sigkill_and_resumed_has_the_tokens_and_losses_of_one_that_was_not(
    teacher: Path, tokens: Path, tmp_path: Path
) -> None:
    plain = write_config(tmp_path / "plain.json", on_policy(tokens, tmp_path / "plain", teacher))
    run(plain, tmp_path / "expected", *LONGER, processes=2)
    killed = write_config(tmp_path / "killed.json", on_policy(tokens, tmp_path / "killed", teacher))
    words = ["-m", "tests.run.distillation.recorded_tokens", str(tmp_path / "tokens"), "--config", str(killed)]
    kill_after(6, tmp_path / "killed", [*words, *(word for each in LONGER for word in ("--set", each))])
    run(killed, tmp_path / "tokens", *LONGER, processes=2)
    [resumed] = [row for row in read_rows(tmp_path / "killed", kind="event") if row["event"] == "resumed"]
    assert 0 < resumed["step"] < 24
    assert read(tmp_path / "tokens") == read(tmp_path / "expected")  # those that were sampled twice are the same, too
    assert losses(tmp_path / "killed") == losses(tmp_path / "plain")  # to the last bit: the layout is the same
    assert read_manifest(tmp_path / "killed", kind="run").details["finished"]
