"""Marks and a cluster for test modules, and a training run under slurm/train.sbatch as its user sees it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import warm_python
from tests.virtual_cluster.cluster import VirtualCluster, missing_requirements

ROOT = Path(__file__).parents[2]


NEEDS_SLURM = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements())),
]
"""The `pytestmark` of a module: its tests are skipped where a cluster cannot be started."""


def module_cluster(**size: int) -> Any:
    """A fixture `cluster`, to be assigned to that name in a module; `size`: nodes, cpus and gpus of a node."""

    @pytest.fixture(scope="module", name="cluster")
    def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualCluster]:
        with VirtualCluster(tmp_path_factory.mktemp("cluster"), **size) as running:
            yield running

    return made


def job_env() -> dict[str, str]:
    """The environment of jobs: the programs of the tests; one thread each, since all nodes share the cores."""
    path = os.pathsep.join([str(warm_python.folder()), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"HEADRACE_VENV": "", "PATH": path, "OMP_NUM_THREADS": "1"}


@dataclass
class SlurmRun:
    """A run submitted to a cluster; `log` is the output of its job."""

    cluster: VirtualCluster
    directory: Path
    log: Path
    job: int = field(default=0)

    def submit(self, config: Path, options: Sequence[str], **env: str) -> None:
        options = [*options, f"--output={self.log}"]
        self.job = self.cluster.sbatch(
            "slurm/train.sbatch", str(config), options=options, cwd=ROOT, env={**job_env(), **env}
        )

    def losses(self) -> dict[int, float]:
        """Step -> loss, of the lines that are whole."""
        file = self.directory / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}

    def step(self) -> int:
        return list(self.losses() or [0])[-1]

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, condition: Callable[[], bool], *, timeout_s: float = 240) -> float:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > timeout_s:
                queue = self.cluster.run("squeue") + self.cluster.run("sinfo")
                raise TimeoutError(f"waited {timeout_s} s\n{self.text()[-4000:]}\n{queue}")
            time.sleep(0.1)
        return time.monotonic() - began

    def wait_for_step(self, step: int, **options: float) -> float:
        return self.wait_for(lambda: self.step() >= step, **options)

    def lines_of(self, word: str) -> int:
        return sum(word in line for line in self.text().splitlines())
