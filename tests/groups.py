"""Islands and replicas as tests start them: the command that supervises the groups of a run, and their journals."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.checkpoint.read_shards import ShardReader
from pipeline.runtime.launch.group import free_port
from pipeline.runtime.metrics.journal import read_rows
from tests.conftest import tiny_config, write_config
from tests.warm_python import python


def make_config(kind: str, tokens: Path, work: Path, *, run_steps: int, **section: Any) -> Path:
    """A tiny run of two groups (islands or replicas) in `work`; keyword arguments are keys of the section."""
    found = {"count": 2, "lighthouse": f"127.0.0.1:{free_port()}", "timeout_s": 10, **section}
    config = tiny_config(tokens, work / "run", engine="torch", **{kind: found})
    config["zero_optimization"] = {"stage": 0}
    config["run"] |= {"steps": run_steps, "checkpoint_every": 5}
    return write_config(work / "c.json", config)


def command(kind: str, config: Path, *sets: str, options: tuple[str, ...] = ()) -> list[str]:
    overrides = [word for text in sets for word in ("--set", text)]
    return [python(), "-m", "headrace", kind, "--config", str(config), *overrides, *options]


def run_groups(kind: str, config: Path, *sets: str, options: tuple[str, ...] = ()) -> None:
    """Runs them to their end, and shows their logs where one fails."""
    words = command(kind, config, *sets, options=options)
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    logs = "".join(each.read_text()[-2000:] for each in config.parent.glob("run/*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs


def events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir, kind="event") if row["event"] in names]


def weights(run_dir: Path, key: str = "weight") -> dict[str, torch.Tensor]:
    """The tensors under a key in a run's newest checkpoint."""
    directory = (run_dir / "checkpoints/latest").resolve()
    metadata = read_metadata(directory)
    wanted = {each.key: torch.empty(each.shape) for each in metadata.tensors if each.key.startswith(f"{key}/")}
    ShardReader(directory, metadata).read(wanted)
    return {name.partition("/")[2]: value for name, value in wanted.items()}


def assert_equal_weights(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
