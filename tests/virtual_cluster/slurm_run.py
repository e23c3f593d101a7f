"""A training run under slurm/train.sbatch on the virtual cluster, as its user sees it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import warm_python
from tests.virtual_cluster.cluster import VirtualCluster

ROOT = Path(__file__).parents[2]


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
