"""Nodes that die under slurm/train.sbatch, at the times that Slurm takes by default: 300 s until it notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import launch, losses, tiny_config, write_config
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.settings import SITE
from tests.virtual_cluster.slurm_run import NEEDS_SLURM, SlurmRun

pytestmark = NEEDS_SLURM
FAR = 100_000
"""Steps of a run that is not to end within the test."""


@pytest.fixture
def run(
    request: pytest.FixtureRequest, tokens: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmRun]:
    """A run of three nodes; the parameters are its number of steps, and the nodes of the cluster."""
    steps, nodes = getattr(request, "param", (FAR, 3))
    section = {"dir": str(tmp_path / "run"), "steps": steps, "seed": 7, "checkpoint_every": 20}
    schedule = {"type": "WSD", "params": {"warmup_num_steps": 3, "decay_num_steps": 5}}
    config = tiny_config(tokens, tmp_path / "run", run=section, scheduler=schedule, parallel={"elastic": True})
    state = tmp_path_factory.mktemp("site")  # a socket's path has room for 108 characters
    with VirtualCluster(state, nodes=nodes, cpus=2, patience=SITE) as cluster:
        made = SlurmRun(cluster, tmp_path / "run", tmp_path / "train.out")
        made.submit(write_config(tmp_path / "train.json", config), ["--nodes=3", "--time=600"])
        yield made


def nodes_of(run: SlurmRun) -> str:
    """Of the job, as Slurm knows them."""
    return run.cluster.run("squeue", "--noheader", f"--jobs={run.job}", "--format=%N").strip()


def after_crash(run: SlurmRun, name: str) -> float:
    """Crashes a node; returns the seconds until the run has made more steps than before."""
    before, starts = run.step(), run.lines_of("agents: start ")
    run.cluster.node(name).crash()
    seconds = run.wait_for(lambda: run.lines_of("agents: start ") > starts)
    return seconds + run.wait_for(lambda: run.step() > before)


@pytest.mark.integration
def test_the_first_node_dies_and_training_goes_on_alike(run: SlurmRun, tokens: Path, tmp_path: Path) -> None:
    run.wait_for_step(22)
    after_crash(run, "n1")
    assert nodes_of(run) == "n[1-3]"  # Slurm still takes the first node for alive
    assert "start 2 on n2, n3 (n1 does not answer)" in run.text()
    assert "resuming after step 20" in run.text()
    run.wait_for_step(40)
    found = run.losses()
    run.cluster.run("scancel", str(run.job))
    section = {"dir": str(tmp_path / "alone"), "steps": 46, "seed": 7}
    launch("train.py", write_config(tmp_path / "alone.json", tiny_config(tokens, tmp_path / "alone", run=section)))
    for step, loss in losses(tmp_path / "alone").items():
        if step <= 40:  # before its own decay of the learning rate begins
            assert found[step] == pytest.approx(loss, rel=1e-4)


def assert_resumed_where_stopped(run: SlurmRun) -> None:
    run.wait_for(lambda: run.text().count("resuming after") == 2)
    saved = int(run.text().partition("stopped by SIGUSR1 after step ")[2].partition(":")[0])
    assert f"resuming after step {saved} " in run.text()
    run.wait_for_step(saved + 20)


@pytest.mark.sweep
def test_a_node_that_comes_back_takes_part_again_without_a_lost_step(run: SlurmRun) -> None:
    run.wait_for_step(22)
    after_crash(run, "n2")
    run.cluster.node("n2").up()
    run.wait_for(lambda: "start 3 on n1, n2, n3 (more nodes are there)" in run.text())
    assert_resumed_where_stopped(run)


@pytest.mark.sweep
@pytest.mark.parametrize("run", [(FAR, 4)], indirect=True)
def test_another_node_takes_the_place_of_one_that_died_without_a_lost_step(run: SlurmRun) -> None:
    run.wait_for_step(22)
    after_crash(run, "n2")
    run.wait_for(lambda: "is queued for another node" in run.text())
    run.wait_for(lambda: "n4 is there: it takes part from the next checkpoint on" in run.text())
    run.wait_for(lambda: "start 3 on n1, n3, n4 (more nodes are there)" in run.text())
    assert_resumed_where_stopped(run)
    assert nodes_of(run) == "n[1-3]"  # of the job itself, whose dead node Slurm has not noticed
    run.cluster.run("scancel", "--signal=USR1", str(run.job))
    run.wait_for(lambda: not run.cluster.run("squeue", "--noheader", "--name", f"headrace-join-{run.job}").strip())


@pytest.mark.sweep
@pytest.mark.parametrize("run", [(300, 3)], indirect=True)
def test_the_job_of_a_run_whose_first_node_is_gone_ends_with_the_code_of_the_run(run: SlurmRun) -> None:
    """The agents end it; it is complete once Slurm has declared the node dead."""
    run.wait_for_step(22)
    after_crash(run, "n1")
    job = run.cluster.wait(run.job, timeout_s=900)
    assert job.state == "COMPLETED"
    assert run.text().count("finished: 300 steps") == 1


@pytest.mark.sweep
def test_the_first_node_comes_back_before_slurm_notices(run: SlurmRun) -> None:
    """Slurm finds the batch script gone, and queues the job again; the agents save on its SIGTERM."""
    run.wait_for_step(22)
    after_crash(run, "n1")
    run.cluster.node("n1").up()
    run.wait_for(lambda: run.text().count("start 1 on n1, n2, n3") == 2, timeout_s=400)
    run.wait_for_step(run.step() + 20)
    assert list(run.losses()) == sorted(run.losses())
