"""What executors on several machines promise, whichever engine they run on, and what is refused before a start."""

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

from data_prep.executors.base import attempt
from data_prep.executors.task_claims import Assignment, TaskClaims, TaskOutcome, read_heartbeats, work
from data_prep.task import Counts, Report
from tests.data_prep.executors.conftest import Corpus

STEP = Counts(10, 20, 2, 30, Counter({"too_short": 1}))


@dataclass(frozen=True)
class Counting:
    """Counts `steps` times and leaves nothing else; for looking at what is said meanwhile."""

    steps: int

    @property
    def name(self) -> str:
        return "map task 0"

    @property
    def finished(self) -> bool:
        return False

    def run(self, report: Report) -> dict[str, Any]:
        for _ in range(self.steps):
            report(STEP)
        return {"steps": self.steps}


def in_another_process(assignment: Assignment) -> TaskOutcome:
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, (assignment,))


@dataclass(frozen=True)
class Overtaken:
    """Works until it is told to stop; somebody else writes `marker` meanwhile."""

    marker: Path

    @property
    def name(self) -> str:
        return "map task 0"

    @property
    def finished(self) -> bool:
        return self.marker.is_file()

    def run(self, report: Report) -> dict[str, Any]:
        if self.finished:
            return {"by": "another"}
        for _ in range(100):
            report(STEP)
            self.marker.touch()
            time.sleep(0.1)
        return {"by": "this one"}


def test_a_task_stops_when_another_attempt_at_it_has_finished(tmp_path: Path) -> None:
    reported: list[Counts] = []
    assert attempt(Overtaken(tmp_path / "done"), reported.append) == ("done", {"by": "another"})
    assert len(reported) < 50


def test_what_an_attempt_counted_that_was_lost_is_not_counted_again(tmp_path: Path) -> None:
    reported: list[Counts] = []
    with TaskClaims(tmp_path, [Counting(3)]) as board:
        (assignment,) = board.assignments()
        in_another_process(replace(assignment, task=Counting(1)))  # this far it came before its machine went
        (beat,) = read_heartbeats(assignment.run)
        assert (beat.task, beat.host) == ("map task 0", socket.gethostname())
        board.poll(reported.append)
        outcome = in_another_process(assignment)
        _, result = board.finished(0, outcome, reported.append)
    assert result == {"steps": 3}
    assert sum(reported, Counts()) == STEP + STEP + STEP
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_does_not_see_the_job_says_which_machine_and_which_directory(tmp_path: Path) -> None:
    with TaskClaims(tmp_path, [Counting(1)]) as board:
        (assignment,) = board.assignments()
        outcome = in_another_process(replace(assignment, run=tmp_path / "elsewhere", coordinator="login-1"))
    assert outcome.kind == "error"
    assert f"{socket.gethostname()} does not see {tmp_path / 'elsewhere'} of login-1" in outcome.value


def test_a_task_whose_coordinator_has_gone_stops(tmp_path: Path) -> None:
    with mp.get_context("spawn").Pool(1) as pool:
        with TaskClaims(tmp_path, [Counting(10**9)]) as board:
            (assignment,) = board.assignments()
            attempt = pool.apply_async(work, (assignment,))
            while not read_heartbeats(assignment.run):
                time.sleep(0.01)
        assert attempt.get(timeout=30).value == "map task 0 was given up by its coordinator"


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("spark", "pyspark")])
def test_an_engine_that_is_not_installed_is_refused_and_the_extra_named(
    corpus: Corpus, tmp_path: Path, engine: str, package: str
) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('as where it is not installed')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    job = corpus.start(tmp_path / "tokens", "--executor", engine, env={"PYTHONPATH": path})
    code, printed = job.end()
    assert code == 2
    assert f'pip install "headrace[{engine}]"' in printed
    assert not job.root.exists()


@pytest.mark.parametrize(
    ("engine", "address"), [("ray", "127.0.0.1:1"), ("spark", "spark://127.0.0.1:1"), ("local", "x")]
)
def test_a_cluster_that_does_not_answer_is_refused_at_once(
    corpus: Corpus, tmp_path: Path, engine: str, address: str
) -> None:
    if engine != "local":
        pytest.importorskip({"ray": "ray", "spark": "pyspark"}[engine])
    job = corpus.start(tmp_path / "tokens", "--executor", engine, "--address", address)
    code, printed = job.end(timeout_s=30)
    assert code == 2
    assert "error: --address" in printed
    assert not job.root.exists()
