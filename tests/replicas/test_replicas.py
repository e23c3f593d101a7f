"""Replicas as real processes with torchft's lighthouse: one curve, a death in the middle of a step, a late comer."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.metadata import read_metadata
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.launch.group import free_port
from pipeline.metrics.journal import read_rows
from tests.conftest import launch, losses, tiny_config, write_config

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed (the extra islands)")

FP32 = 2e-5
"""fp32's tolerance in docs/reference/parity.md."""


def make_config(tokens: Path, work: Path, *, steps: int, **replicas: Any) -> Path:
    section = {"count": 2, "lighthouse": f"127.0.0.1:{free_port()}", "timeout_s": 10, **replicas}
    config = tiny_config(tokens, work / "run", engine="torch", replicas=section)
    config["zero_optimization"] = {"stage": 0}
    config["run"] |= {"steps": steps, "checkpoint_every": 5}
    return write_config(work / "c.json", config)


def command(config: Path, *sets: str, options: tuple[str, ...] = ()) -> list[str]:
    overrides = [word for text in sets for word in ("--set", text)]
    return [sys.executable, "-m", "headrace", "replicas", "--config", str(config), *overrides, *options]


def run_replicas(config: Path, *sets: str, options: tuple[str, ...] = ()) -> None:
    done = subprocess.run(
        command(config, *sets, options=options), capture_output=True, text=True, timeout=400, check=False
    )
    logs = "".join(each.read_text()[-2000:] for each in config.parent.glob("run/*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs


def events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir, kind="event") if row["event"] in names]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    directory = (run_dir / "checkpoints/latest").resolve()
    metadata = read_metadata(directory)
    wanted = {each.key: torch.empty(each.shape) for each in metadata.tensors if each.key.startswith("weight/")}
    ShardReader(directory, metadata).read(wanted)
    return wanted


def assert_equal_weights(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def plain_losses(config: Path, work: Path) -> dict[int, float]:
    """Of one plain process with the same config."""
    launch("train.py", config, "replicas=null", f"run.dir={work / 'plain'}")
    return losses(work / "plain")


def test_two_replicas_follow_the_loss_of_one_plain_process(tokens: Path, tmp_path: Path) -> None:
    config = make_config(tokens, tmp_path, steps=10, start_s=100)
    run_replicas(config)
    first, second = (tmp_path / "run" / f"replica-{number}" for number in range(2))
    plain = plain_losses(config, tmp_path)
    assert losses(first) == pytest.approx(plain, rel=FP32)
    assert losses(first) == losses(second)
    assert_equal_weights(first, second)
    [division] = events(first, "quorum")
    assert (division["step"], division["parts"]) == (1, {"replica-0": [[0, 4]], "replica-1": [[4, 8]]})
