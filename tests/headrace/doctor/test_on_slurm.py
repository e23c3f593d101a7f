"""Doctor on a real Slurm with four virtual nodes: its node checks and ranks on all of them, and what a kill leaves."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from headrace.doctor.check import Check
from tests.conftest import ROOT, tiny_config, write_config
from tests.headrace.doctor.made_checks import SLEEPS, doctor_command, read_findings, write_modules
from tests.support import wait_until
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.slurm_run import NEEDS_SLURM, job_env, module_cluster

pytestmark = [*NEEDS_SLURM, pytest.mark.integration]
cluster = module_cluster(nodes=4, cpus=2, gpus=1)  # Slurm only counts them; no job here asks for one
REDUCES = """
def run(context):
    import torch, torch.distributed as dist
    ones = torch.ones(1)
    dist.all_reduce(ones)
    yield Finding(True, f"{dist.get_world_size()} ranks: {ones.item():g}")
"""
NODES = ["n1", "n2", "n3", "n4"]


@pytest.mark.sweep
def test_node_checks_and_ranks_run_on_all_nodes_of_a_job(cluster: VirtualCluster, tmp_path: Path, tokens: Path) -> None:
    fields = {"launch": {"node_checks": {"payload_mb": 1, "slow_link": 0.01}}, "train_batch_size": 16}  # two cores
    config = write_config(tmp_path / "c.json", tiny_config(tokens, tmp_path / "run", engine="torch", **fields))
    words = ["--config", str(config), "--only", "gpus,machine,nodes,versions,config", "--out", str(tmp_path / "out")]
    options, env = ["--nodes=4", f"--output={tmp_path}/log"], job_env()
    number = cluster.sbatch("slurm/doctor.sbatch", *words, options=options, cwd=ROOT, env=env)
    job = cluster.wait(number, timeout_s=300)
    said = (tmp_path / "log").read_text()
    assert (job.state, job.exit_code) == ("COMPLETED", 0), said
    passed = [(each["check"], each["where"]) for each in read_findings(tmp_path / "out") if each["passed"]]
    assert {(check, node) for check in ("machine", "nodes", "versions", "config") for node in NODES} <= {*passed}, said
    assert "a training may start" in said

    path = write_modules(tmp_path / "modules", reduces=REDUCES)
    command = ["python", *doctor_command(tmp_path / "ranks", [Check("sum", "a sum", "reduces", "ranks", 120.0)])[1:]]
    set_up = f"source {ROOT}/slurm/env.sh\nheadrace_interface\nexport PYTHONPATH={path}\n"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{set_up}{shlex.join(command)}\n")
    number = cluster.sbatch(tmp_path / "job.sh", options=options, cwd=ROOT, env=env)
    assert cluster.wait(number, timeout_s=300).exit_code == 0, (tmp_path / "log").read_text()
    [found] = read_findings(tmp_path / "ranks")
    assert found["text"] == "8 ranks: 8"  # two of each node


def test_a_killed_doctor_leaves_nothing_on_any_node(cluster: VirtualCluster, tmp_path: Path) -> None:
    mark = f"hanging-{tmp_path.name}"
    path = write_modules(
        tmp_path / "modules",
        hangs=SLEEPS.replace("MARK", mark),
        ill="def run(context):\n    yield Finding(context.node != 'n3', 'seen', 'x', 'y')\n",
    )
    out = tmp_path / "out"
    checks = [Check("ill", "one is ill", "ill", "node"), Check("hangs", "it hangs", "hangs", "node")]
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{shlex.join(doctor_command(out, checks))}\nsleep 60\n")  # the job goes on
    env = {**job_env(), "PYTHONPATH": path}
    number = cluster.sbatch(script, options=["--nodes=4", f"--output={tmp_path}/log"], cwd=tmp_path, env=env)

    def hanging() -> list[list[int]]:
        """The processes of the check on each node."""
        return [_processes(cluster, name, mark) for name in NODES]

    wait_until(lambda: all(len(each) == 2 for each in hanging()), within_s=120, poll_s=0.5)
    [doctor] = _processes(cluster, "n1", f"from headrace.doctor.command.*{out.name}")
    cluster.node("n1").machine.run("kill", "-KILL", str(doctor))
    wait_until(lambda: not any(hanging()), within_s=30, poll_s=0.5)
    wait_until(lambda: not any(_processes(cluster, name, "headrace.doctor.agent") for name in NODES), within_s=30)
    cluster.run("scancel", str(number))
    found = [(each["where"], each["passed"]) for each in read_findings(out) if each["check"] == "ill"]
    assert sorted(found) == [("n1", True), ("n2", True), ("n3", False), ("n4", True)]


def _processes(cluster: VirtualCluster, node: str, pattern: str) -> list[int]:
    shown = cluster.node(node).machine.run("sh", "-c", f"pgrep -f -- '[{pattern[0]}]{pattern[1:]}' || true")
    return [int(pid) for pid in shown.split()]
