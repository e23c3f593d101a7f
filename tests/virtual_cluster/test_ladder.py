"""`headrace ladder --slurm` on a real Slurm: the sweep, the runs and the fit as a chain of arrays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, tiny_config, write_config
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.fixtures import NEEDS_SLURM, module_cluster
from tests.virtual_cluster.slurm_run import job_env

pytestmark = [pytest.mark.sweep, *NEEDS_SLURM]
cluster = module_cluster(nodes=2, cpus=1)


def test_the_arrays_of_a_ladder_end_with_its_prediction(cluster: VirtualCluster, tokens: Path, tmp_path: Path) -> None:
    fields = tiny_config(tokens, tmp_path / "run", engine="reference", zero_optimization={"stage": 0})
    run = {"dir": str(tmp_path / "run"), "steps": 300, "seed": 7}
    config = write_config(tmp_path / "large.json", {**fields, "run": run})
    words = ["--rungs", "3", "--smallest", "0.1", "--largest", "0.6", "--budgets", "0.5,1", "--learning-rates", "1"]
    command = [sys.executable, "-P", "-m", "pipeline", "ladder", "--config", str(config), *words]
    printed = cluster.run(*command, "--tolerance", "0.5", "--slurm", cwd=ROOT, env=job_env(), timeout_s=240)
    assert "an array of 6" in printed, printed
    output = tmp_path / "run-ladder"
    jobs = cluster.wait_for_all(timeout_s=900)
    logs = "\n".join(path.read_text()[-1500:] for path in sorted((output / "logs").glob("slurm-*")))
    assert {job.state for job in jobs} == {"COMPLETED"}, logs
    assert len([job for job in jobs if job.name == "headrace-ladder-runs"]) == 6
    results = json.loads((output / "results.json").read_text())
    assert len(results["runs"]) == 6
    assert results["prediction"] is not None, logs
