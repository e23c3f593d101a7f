"""Ray, with a cluster of two nodes: each a raylet with workers of its own. What is killed is killed by SIGKILL."""

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

pytest.importorskip("ray", reason='needs Ray: pip install "headrace[ray]"')

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


def test_a_node_that_is_killed_in_the_middle_changes_no_byte_and_loses_nothing(
    corpus: Corpus, cluster: RayCluster, tmp_path: Path
) -> None:
    node = cluster.add_node()
    job = corpus.start(tmp_path / "tokens", "--executor", "ray", "--address", cluster.address)
    job.caught(lambda beat: _below(node, beat))
    assert re.search(rf"map: \d+ of \d+ tasks finished\n(.*\n)*  \S+:{job.process.pid} map \d+% ", job.status())
    kill_tree(node)
    code, printed = job.end()
    assert code == 0, printed
    assert tree(tmp_path / "tokens") == corpus.expected
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_a_worker_that_hangs_is_overtaken_by_a_second_copy_of_its_task(
    corpus: Corpus, cluster: RayCluster, tmp_path: Path
) -> None:
    node = cluster.add_node()
    job = corpus.start(tmp_path / "tokens", "--executor", "ray", "--address", cluster.address)
    hanging = job.caught(lambda beat: _below(node, beat))
    code, printed = job.end()
    assert code == 0, printed
    assert tree(tmp_path / "tokens") == corpus.expected
    hanging.wait(timeout=30)  # Ray ends it with the job
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    kill_tree(node)


def test_a_task_whose_worker_is_killed_each_time_ends_the_job_with_a_message(
    corpus: Corpus, cluster: RayCluster, tmp_path: Path
) -> None:
    """As when memory runs out: another attempt would end like the last."""
    job = corpus.start(tmp_path / "tokens", "--executor", "ray", "--address", cluster.address)
    attempts = set()
    while job.process.poll() is None:
        with suppress(psutil.NoSuchProcess, AssertionError):
            worker = job.caught(lambda beat: beat.task == "map task 3" and beat.pid not in attempts)
            worker.kill()
            attempts.add(worker.pid)
    code, printed = job.end()
    assert code == 2, printed
    assert len(attempts) == 5
    assert "error: map task 3 did not come back from its workers" in printed


def test_an_error_of_a_task_is_one_message_and_no_stack_trace(
    corpus: Corpus, cluster: RayCluster, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes((corpus.directory / "library.jsonl").read_bytes() + b"no json\n")
    options = ["--executor", "ray", "--address", cluster.address, "--set", f"sources.0.path={bad}"]
    code, printed = corpus.start(tmp_path / "tokens", *options).end()
    assert code == 2
    assert printed.count("error: ") == 1
    assert "bad.jsonl" in printed
    assert "Traceback" not in printed
    assert "ray" not in printed.split("error: ")[1]


def _below(node: psutil.Process, beat: TaskHeartbeat) -> bool:
    return any(beat.pid == child.pid for child in node.children(recursive=True))
