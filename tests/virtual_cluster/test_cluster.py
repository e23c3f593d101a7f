"""The virtual cluster itself: nodes are separate hosts, can crash, and no process outlives the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import wait_until
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.settings import Patience
from tests.virtual_cluster.slurm_run import NEEDS_SLURM

ROOT = Path(__file__).parents[2]
pytestmark = NEEDS_SLURM


def test_every_node_has_its_own_name_and_address(tmp_path: Path) -> None:
    with VirtualCluster(tmp_path, nodes=2) as cluster:
        output = cluster.run(
            "srun", "--nodes=2", "--ntasks=2", "sh", "-c", "echo $(hostname) $(ip -o -4 addr show eth0)"
        )
    fields = sorted(line.split() for line in output.splitlines())
    assert [(line[0], line[4]) for line in fields] == [("n1", "10.77.0.1/24"), ("n2", "10.77.0.2/24")]


def test_two_clusters_run_at_the_same_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        VirtualCluster(tmp_path_factory.mktemp("a"), nodes=1) as one,
        VirtualCluster(tmp_path_factory.mktemp("b"), nodes=1) as other,
    ):
        job = one.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=true")
        assert one.wait(int(job)).state == "COMPLETED"
        assert other.jobs() == []


def test_a_crashed_node_goes_down_and_its_job_is_requeued_when_it_is_back(tmp_path: Path) -> None:
    # with 5 s Slurm declares a node down after about 10
    with VirtualCluster(tmp_path, nodes=2, patience=Patience(down_after_s=5)) as cluster:
        script = tmp_path / "job.sh"
        script.write_text('#!/bin/sh\ntouch "started.${SLURM_RESTART_COUNT:-0}"\nsleep 1000\n')
        cluster.sbatch(script, options=["--requeue", "--nodelist=n2", "--output=/dev/null"], cwd=tmp_path)
        wait_until((tmp_path / "started.0").exists)
        cluster.node("n2").crash()
        cluster.wait_for_nodes("down", "n2")
        cluster.node("n2").up()
        wait_until((tmp_path / "started.1").exists)


def test_no_process_outlives_a_cluster_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.virtual_cluster", "sleep", "1000"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as process:
        while process.stdout.readline() not in ("ready\n", ""):
            pass
        assert _processes_of(tmp_path)
        process.kill()
    end = time.monotonic() + 10
    while _processes_of(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert _processes_of(tmp_path) == []


def _processes_of(directory: Path) -> list[str]:
    """Command lines of the processes that have `directory` in their arguments or their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            strings = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if str(directory).encode() in strings:
            found.append((process / "cmdline").read_text())
    return found
