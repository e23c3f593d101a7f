"""`headrace status` on a real Slurm of one node: a job that waits, by its run directory and without one; a held one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import ROOT, write_config
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.fixtures import NEEDS_SLURM, module_cluster
from tests.virtual_cluster.slurm_run import job_env

pytestmark = NEEDS_SLURM
cluster = module_cluster(nodes=1, cpus=1)


def test_a_waiting_job_says_why_and_is_found_by_its_run_directory(cluster: VirtualCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "c.json", {"run": {"dir": str(run_dir)}})
    options = ["--nodes=1", "--hold", f"--output={tmp_path}/out"]
    held = cluster.sbatch("slurm/train.sbatch", str(config), options=options, cwd=ROOT, env=job_env())
    options = ["--nodes=1", "--begin=now+1hour", f"--output={tmp_path}/out"]
    more = ("--set", f"run.dir={run_dir}-2")
    later = cluster.sbatch("slurm/train.sbatch", str(config), *more, options=options, cwd=ROOT, env=job_env())
    try:
        for given in (run_dir, config):
            shown = cluster.run("python", "-m", "headrace", "status", str(given), cwd=ROOT, env=job_env())
            assert f"{held} waits: held: 'scontrol release JOB' lets it go (JobHeldUser)" in shown
        shown = cluster.run("python", "-m", "headrace", "status", f"{run_dir}-2", "--json", cwd=ROOT, env=job_env())
        [job] = json.loads(shown)["jobs"]
        assert (job["id"], job["state"], job["reason"]) == (str(later), "PENDING", "BeginTime")
        listed = cluster.run("python", "-m", "headrace", "status", cwd=tmp_path, env=job_env())
        assert {f"headrace-train {number} waits" in listed for number in (held, later)} == {True}
    finally:
        cluster.run("scancel", str(held), str(later))


def test_another_program_and_spaces_in_paths_do_not_end_a_status(cluster: VirtualCluster, tmp_path: Path) -> None:
    """Slurm prints the command line of a job without its quotes."""
    place = tmp_path / "a place"
    place.mkdir()
    (place / "sleep.sh").write_text("#!/bin/bash\nsleep 60\n")
    other = cluster.sbatch(str(place / "sleep.sh"), "don't", options=["--hold"], cwd=place, env=job_env())
    options = ["--hold", f"--comment={place}/run"]
    ours = cluster.sbatch(str(place / "sleep.sh"), options=options, cwd=place, env=job_env())
    try:
        listed = cluster.run("python", "-m", "headrace", "status", cwd=place, env=job_env())
        assert f"{other} waits" in listed
        shown = cluster.run("python", "-m", "headrace", "status", f"{place}/run", cwd=place, env=job_env())
        assert f"{ours} waits: held" in shown
        assert str(other) not in shown.split()
        [output] = files_of(cluster, ours, place)
        assert output == f"{place}/slurm-{ours}.out"
    finally:
        cluster.run("scancel", str(other), str(ours))


def files_of(cluster: VirtualCluster, number: int, cwd: Path) -> list[str]:
    code = f"from pipeline.cluster.status.slurm import output_files; print(*output_files(['{number}']), sep='\\n')"
    return cluster.run("python", "-c", code, cwd=cwd, env=job_env()).splitlines()
