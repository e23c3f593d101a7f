"""What agents ask of a real Slurm for the job of a run: its end, more nodes, and what a SIGTERM means."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.cluster.elastic import slurm_requeue
from pipeline.cluster.elastic.commands import Commands
from pipeline.cluster.elastic.files import RanksPlan
from pipeline.cluster.elastic.slurm_requeue import SlurmJob
from tests.support import wait_until
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.settings import Patience
from tests.virtual_cluster.slurm_run import NEEDS_SLURM

pytestmark = NEEDS_SLURM
_PREEMPTION = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL MaxTime=INFINITE GraceTime=60 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10
"""


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualCluster]:
    made = VirtualCluster(tmp_path_factory.mktemp("c"), nodes=3, cpus=1, patience=Patience(down_after_s=5))
    with (made.state / "slurm.conf").open("a") as conf:
        conf.write(_PREEMPTION)
    with made as running:
        yield running


@dataclass
class OnNode(Commands):
    """Runs commands on the last node, where an agent may be."""

    cluster: VirtualCluster | None = None

    def run(
        self, command: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout_s: float = float("inf")
    ) -> subprocess.CompletedProcess[str]:
        assert self.cluster is not None
        inside = self.cluster.node("n3").machine.command(*command)
        return super().run(inside, environ={**(environ or {}), **self.cluster.env}, timeout_s=timeout_s)


def submitted(cluster: VirtualCluster, work: Path, text: str, *options: str) -> int:
    script = work / f"{len(list(work.iterdir()))}.sh"
    script.write_text(f"#!/bin/sh\n{text}\n")
    return cluster.sbatch(script, options=["--output=/dev/null", "--no-kill", *options], cwd=work)


def of_agents(cluster: VirtualCluster, number: int, work: Path, join: Sequence[str] = ()) -> SlurmJob:
    commands = OnNode(cluster=cluster)
    return SlurmJob(str(number), "n1", work, work / "outcome", tasks=1, wanted=3, commands=commands, join=join)


@pytest.mark.parametrize(("code", "state", "waiting"), [(0, "COMPLETED", "COMPLETED"), (3, "FAILED", "CANCELLED")])
def test_a_job_whose_first_node_is_gone_ends_with_its_code_and_what_waits_for_it_goes_by_that(
    cluster: VirtualCluster, tmp_path: Path, code: int, state: str, waiting: str
) -> None:
    began = tmp_path / "began"
    text = f"srun true; touch {began}; sleep 1000"
    number = submitted(cluster, tmp_path, text, "--nodes=3", "--ntasks-per-node=1", "--requeue")
    after = submitted(cluster, tmp_path, "true", f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes")
    wait_until(began.exists)  # Slurm itself queues a job again whose script cannot be started
    cluster.node("n1").crash()
    cluster.wait_for_nodes("down", "n1")  # and is not to come back
    lines: list[str] = []
    plan = RanksPlan(outcome=code, reason="?")
    of_agents(cluster, number, tmp_path).end(plan, step=0, nodes=2, script_lives=False, say=lines.append)
    ended = cluster.wait(number)
    assert (ended.state, ended.exit_code, cluster.wait(after).state) == (state, code, waiting)
    assert lines == [f"the batch script is gone with its node: job {number} ends with code {code} without it"]


def test_no_job_is_left_for_a_node_that_is_not_there_and_one_that_fails_is_named_once(
    cluster: VirtualCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_requeue, "_ASK_S", 0.0)
    join, lines = tmp_path / "join.sh", list[str]()
    join.write_text("#!/bin/sh\nexec 2>&1\necho no data here\nexit 3\n")
    number = submitted(cluster, tmp_path, "sleep 1000", "--nodes=2", "--ntasks-per-node=1")
    wait_until(lambda: cluster.run("squeue", "--noheader", f"--jobs={number}", "--format=%N").strip() == "n[1-2]")
    job = of_agents(cluster, number, tmp_path, [str(join)])
    for _ in range(3):
        job.ask_for(1, guests=0, excluded=["n3"], say=lines.append)
    assert [each.id for each in cluster.jobs()] == [number]
    assert [line.partition(":")[0] for line in lines] == ["no node can be asked for yet"]
    lines.clear()
    job.ask_for(1, guests=0, excluded=[], say=lines.append)
    failed = next(each.id for each in cluster.jobs() if each.id != number)
    assert cluster.wait(failed).state == "FAILED"
    for _ in range(3):
        job.ask_for(1, guests=0, excluded=[], say=lines.append)
    assert [each.id for each in cluster.jobs()] == [number, failed]
    assert lines == [
        f"job {failed} is queued for another node",
        f"job {failed} for another node failed on n3; it is not asked for again: no data here",
    ]


def test_a_sigterm_of_a_person_a_preemption_and_an_end_of_slurms_are_told_apart(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    number = submitted(cluster, tmp_path, "trap '' TERM; exec sleep 1000", "--nodes=3", "--partition=low")
    job = of_agents(cluster, number, tmp_path)
    wait_until(lambda: job.after_sigterm() == "runs")
    submitted(cluster, tmp_path, "true", "--partition=urgent")
    wait_until(lambda: job.after_sigterm() == "preempted")
    cluster.run("scancel", str(number))
    assert job.after_sigterm() == "ends"
