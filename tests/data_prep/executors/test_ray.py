"""The Ray executor on a cluster of two nodes, each a raylet with its own workers. Processes are killed by SIGKILL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep.executors.on_ray import SETTINGS
from data_prep.executors.task_claims import TaskHeartbeat
from tests.data_prep.executors.conftest import Corpus, kill_tree, tree

pytest.importorskip("ray", reason="needs Ray: pip install ray")

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


@dataclass(frozen=True)
class RayCluster:
    address: str
    cluster: Any

    def add_node(self) -> psutil.Process:
        """Adds a node of one CPU; returns its raylet, the parent of its workers."""
        return _raylet(self.cluster.add_node(**NODE))


def _raylet(node: Any) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster  # noqa: PLC0415

        running = Cluster(shutdown_at_exit=False)
        try:
            running.add_node(**NODE)
            yield RayCluster(running.address, running)
        finally:
            running.shutdown()


@pytest.mark.parametrize(
    "fault", ["its node is killed", pytest.param("it hangs", marks=pytest.mark.sweep)]
)  # then speculative execution finishes it
def test_a_lost_task_changes_no_output(corpus: Corpus, cluster: RayCluster, tmp_path: Path, fault: str) -> None:
    node = cluster.add_node()
    job = corpus.start(tmp_path / "tokens", "--executor", "ray", "--address", cluster.address)
    hanging = job.suspend_worker(lambda heartbeat: _runs_on(node, heartbeat))
    if fault == "its node is killed":
        assert re.search(rf"map: \d+ of \d+ tasks finished\n(.*\n)*  \S+:{job.process.pid} map \d+% ", job.status())
        kill_tree(node)
    code, printed = job.wait()
    assert code == 0, printed
    assert tree(tmp_path / "tokens") == corpus.expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [".headrace-tokenizers", "tokens"]
    if fault == "it hangs":
        hanging.wait(timeout=300)  # Ray ends it with the job
        kill_tree(node)


@pytest.mark.sweep
def test_a_task_killed_in_every_attempt_ends_the_job(corpus: Corpus, cluster: RayCluster, tmp_path: Path) -> None:
    """As when memory runs out: every retry would fail in the same way."""
    job = corpus.start(tmp_path / "tokens", "--executor", "ray", "--address", cluster.address)
    attempts = set()
    while job.process.poll() is None:
        with suppress(psutil.NoSuchProcess, AssertionError):
            worker = job.suspend_worker(lambda h: h.task == "map task 3" and h.pid not in attempts)
            worker.kill()
            attempts.add(worker.pid)
    code, printed = job.wait()
    assert code == 2, printed
    assert len(attempts) == 5
    assert "error: map task 3 did not come back from its workers" in printed


def test_a_task_error_is_one_message_without_a_traceback(corpus: Corpus, cluster: RayCluster, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes((corpus.directory / "library.jsonl").read_bytes() + b"no json\n")
    options = ["--executor", "ray", "--address", cluster.address, "--set", f"sources.0.path={bad}"]
    code, printed = corpus.start(tmp_path / "tokens", *options).wait()
    assert code == 2
    assert printed.count("error: ") == 1
    assert "bad.jsonl" in printed
    assert "Traceback" not in printed
    assert "ray" not in printed.split("error: ")[1]


def _runs_on(node: psutil.Process, heartbeat: TaskHeartbeat) -> bool:
    return any(heartbeat.pid == child.pid for child in node.children(recursive=True))
