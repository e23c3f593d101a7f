"""Task claims of executors on several machines, for every engine, and the checks before an engine is started."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.executors.base import attempt_task
from data_prep.executors.task_claims import Assignment, TaskClaims, TaskOutcome, execute_assignment, read_heartbeats
from data_prep.task import Counts, Report
from tests.data_prep.executors.conftest import Corpus

STEP = Counts(10, 20, 2, 30, Counter({"too_short": 1}))


@dataclass(frozen=True)
class CountingTask:
    """Reports `STEP` `steps` times and writes no result; for tests of the progress reports."""

    steps: int
    name, finished = "map task 0", False

    def run(self, report: Report) -> dict[str, Any]:
        for _ in range(self.steps):
            report(STEP)
        return {"steps": self.steps}


def in_another_process(assignment: Assignment) -> TaskOutcome:
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(execute_assignment, (assignment,))


@dataclass(frozen=True)
class TaskFinishedElsewhere:
    """Runs for up to 10 s; `marker` appears meanwhile, as when another attempt finishes."""

    marker: Path
    name = "map task 0"

    @property
    def finished(self) -> bool:
        return self.marker.is_file()

    def run(self, report: Report) -> dict[str, Any]:
        if self.finished:
            return {"by": "another attempt"}
        for _ in range(100):
            report(STEP)
            self.marker.touch()
            time.sleep(0.1)
        return {"by": "this attempt"}


def test_a_task_stops_when_another_attempt_at_it_has_finished(tmp_path: Path) -> None:
    reported: list[Counts] = []
    task = TaskFinishedElsewhere(tmp_path / "done")
    assert attempt_task(task, reported.append) == ("done", {"by": "another attempt"})
    assert len(reported) < 50


def test_the_progress_of_a_lost_attempt_is_not_counted_twice(tmp_path: Path) -> None:
    reported: list[Counts] = []
    with TaskClaims(tmp_path, [CountingTask(3)]) as claims:
        (assignment,) = claims.assignments()
        in_another_process(replace(assignment, task=CountingTask(1)))  # its progress when its machine was lost
        (heartbeat,) = read_heartbeats(assignment.run_directory)
        assert (heartbeat.task, heartbeat.host) == ("map task 0", socket.gethostname())
        claims.poll(reported.append)
        outcome = in_another_process(assignment)
        _, result = claims.finish(0, outcome, reported.append)
    assert result == {"steps": 3}
    assert sum(reported, Counts()) == STEP + STEP + STEP
    assert list(tmp_path.iterdir()) == []


def test_the_error_of_a_worker_that_does_not_see_the_job_names_its_machine_and_the_directory(tmp_path: Path) -> None:
    with TaskClaims(tmp_path, [CountingTask(1)]) as claims:
        (assignment,) = claims.assignments()
        outcome = in_another_process(replace(assignment, run_directory=tmp_path / "elsewhere", coordinator="login-1"))
    assert outcome.kind == "error"
    assert f"{socket.gethostname()} does not see {tmp_path / 'elsewhere'} of login-1" in outcome.value


def test_a_task_stops_when_its_coordinator_has_ended(tmp_path: Path) -> None:
    with mp.get_context("spawn").Pool(1) as pool:
        with TaskClaims(tmp_path, [CountingTask(10**9)]) as claims:
            (assignment,) = claims.assignments()
            attempt = pool.apply_async(execute_assignment, (assignment,))
            while not read_heartbeats(assignment.run_directory):
                time.sleep(0.01)
        assert attempt.get(timeout=120).value == "map task 0 was abandoned: its coordinator has ended"


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("spark", "pyspark")])
def test_a_missing_engine_is_named_with_its_package(corpus: Corpus, tmp_path: Path, engine: str, package: str) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    job = corpus.start(tmp_path / "tokens", "--executor", engine, env={"PYTHONPATH": path})
    code, printed = job.wait()
    assert code == 2
    assert f"pip install {package}" in printed
    assert not job.root.exists()


@pytest.mark.parametrize(
    ("engine", "address"), [("ray", "127.0.0.1:1"), ("spark", "spark://127.0.0.1:1"), ("local", "x")]
)
def test_an_unreachable_cluster_is_an_early_error(corpus: Corpus, tmp_path: Path, engine: str, address: str) -> None:
    if engine != "local":
        pytest.importorskip({"ray": "ray", "spark": "pyspark"}[engine])
    job = corpus.start(tmp_path / "tokens", "--executor", engine, "--address", address)
    code, printed = job.wait()
    assert code == 2
    assert "error: --address" in printed
    assert not job.root.exists()
