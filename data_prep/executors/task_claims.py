"""Task claims: a directory in the job in which the workers of several machines write heartbeats and failures.

    .NAME.job/running/RUN/00007.json       heartbeat and progress of task 7, rewritten every second
    .NAME.job/running/RUN/00007.failed     the error of task 7

The engine (Ray, Spark) transports tasks and results. This directory, the same for all engines, adds progress reports,
for which engines have no channel while a task runs. If `RUN` does not exist, the worker's machine does not see the job,
or the coordinator has ended: the worker does not start, or stops.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from data_prep.executors.base import attempt_task, raise_if_failed
from data_prep.task import Counts, Report, Task, os_errors_as_data_errors
from foundation.errors import DataError, HeadraceError

_HEARTBEAT_INTERVAL_S = 1.0
_NO_START_WARNING_S = 60.0
RUNNING = "running"


@dataclass(frozen=True)
class TaskOutcome:
    """Outcome of one attempt at a task.

    Attributes:
        kind, value: result of `attempt_task`: "done" and the result, "error" and a message, or "bug" and a traceback.
        counts: all work that the attempt reported.
        seconds: seconds that the attempt took on the worker.
    """

    kind: str
    value: Any
    counts: Counts
    seconds: float


@dataclass(frozen=True)
class Assignment:
    """Task number `index` of a run, as it is sent to a worker.

    Attributes:
        cwd: directory to which the task's paths are relative.
        run_directory: `.NAME.job/running/RUN`.
        coordinator: host name of the process that runs the job.
    """

    index: int
    task: Task
    cwd: Path
    run_directory: Path
    coordinator: str

    def execute(self) -> TaskOutcome:
        """Runs the task in a worker and writes heartbeats for the coordinator. Changes the working directory."""
        began = time.monotonic()
        if not self.cwd.is_dir() or not self.run_directory.is_dir():
            return TaskOutcome("error", self._not_visible(), Counts(), 0.0)
        os.chdir(self.cwd)
        heartbeat = _HeartbeatWriter(self)
        kind, value = attempt_task(self.task, heartbeat.add)
        heartbeat.write(ended=True)
        if kind != "done":
            _write_atomically(self.run_directory, f"{self.index:05d}.failed", json.dumps([kind, value]))
        return TaskOutcome(kind, value, heartbeat.counts, time.monotonic() - began)

    def _not_visible(self) -> str:
        absent = self.cwd if not self.cwd.is_dir() else self.run_directory
        return (
            f"{socket.gethostname()} does not see {absent} of {self.coordinator}, which runs the job\n"
            "  try: put the config's paths on a file system that all machines mount under the same path"
        )


def execute_assignment(assignment: Assignment) -> TaskOutcome:
    """Calls `Assignment.execute`, as a module-level function that pickles by its name."""
    return assignment.execute()


class _HeartbeatWriter:
    """Writes a task's counts so far: at its start, once a second, and at its end."""

    def __init__(self, assignment: Assignment) -> None:
        self.counts = Counts()
        self._assignment = assignment
        self.write()

    def add(self, counts: Counts) -> None:
        self.counts = self.counts + counts
        if time.monotonic() - self._written >= _HEARTBEAT_INTERVAL_S and not self.write():
            raise HeadraceError(f"{self._assignment.task.name} was abandoned: its coordinator has ended")

    def write(self, *, ended: bool = False) -> bool:
        """Writes the counts; returns whether the run directory still exists."""
        self._written = time.monotonic()
        process = {"task": self._assignment.task.name, "host": socket.gethostname(), "pid": os.getpid(), "ended": ended}
        counts = {f.name: getattr(self.counts, f.name) for f in fields(Counts)}
        text = json.dumps(process | {"counts": counts})
        return _write_atomically(self._assignment.run_directory, f"{self._assignment.index:05d}.json", text)


def _write_atomically(directory: Path, name: str, text: str) -> bool:
    """Writes a file by a rename; returns whether the directory exists. A failed write does not fail the task."""
    scratch = directory / f".{name}.{uuid.uuid4().hex[:12]}"
    try:
        scratch.write_text(text)
        scratch.rename(directory / name)
    except OSError:
        return directory.is_dir()
    return True


@dataclass
class TaskClaims:
    """The coordinator's side of the directory, for one phase; a context manager that makes and removes the directory.

    Args:
        root: the job directory.
    """

    root: Path
    tasks: Sequence[Task]
    _reported: dict[int, Counts] = field(default_factory=dict)
    """Task -> largest counts of any attempt: lost and repeated work is not counted twice."""

    def __enter__(self) -> TaskClaims:
        parent = self.root.absolute() / RUNNING
        self._run_directory = parent / uuid.uuid4().hex[:12]
        self._polled, self._began = 0.0, time.monotonic()
        with os_errors_as_data_errors(f"making {parent}"):
            shutil.rmtree(parent, ignore_errors=True)  # left by killed coordinators: their workers stop
            self._run_directory.mkdir(parents=True)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        shutil.rmtree(self._run_directory.parent, ignore_errors=True)

    def assignments(self) -> list[Assignment]:
        """The assignments, one for each task."""
        cwd, host = Path.cwd(), socket.gethostname()
        return [Assignment(i, task, cwd, self._run_directory, host) for i, task in enumerate(self.tasks)]

    def poll(self, report: Report) -> None:
        """Reports the work of running tasks since the last call; reads the heartbeats at most once a second.

        Raises:
            DataError: a task has failed.
        """
        if time.monotonic() - self._polled < _HEARTBEAT_INTERVAL_S:
            return
        self._polled = time.monotonic()
        for path in self._run_directory.glob("[0-9]*.failed"):
            task = self.tasks[int(path.stem)]
            if not task.finished:  # otherwise another attempt has succeeded
                raise_if_failed(task.name, *json.loads(path.read_text()))
        for heartbeat in read_heartbeats(self._run_directory):
            self._report_increase(heartbeat.index, heartbeat.counts, report)
            if heartbeat.ended:  # only running tasks then have files
                (self._run_directory / f"{heartbeat.index:05d}.json").unlink(missing_ok=True)
        self._warn_if_nothing_starts()

    def finish(self, index: int, outcome: TaskOutcome, report: Report) -> tuple[Task, dict[str, Any]]:
        """Reports a task's unreported work; returns the task and its result.

        Raises:
            DataError: the task has failed.
        """
        raise_if_failed(self.tasks[index].name, outcome.kind, outcome.value)
        self._report_increase(index, outcome.counts, report)
        return self.tasks[index], outcome.value

    def _report_increase(self, index: int, counts: Counts, report: Report) -> None:
        before = self._reported.get(index, Counts())
        increase = _increase(counts, before)
        self._reported[index] = before + increase
        if increase != Counts():
            report(increase)

    def _warn_if_nothing_starts(self) -> None:
        if self._reported or time.monotonic() - self._began < _NO_START_WARNING_S:
            return
        self._began = time.monotonic()
        why = f"no task has started for {_NO_START_WARNING_S:.0f} s: the cluster may be busy, or its machines too small"
        print(f"waiting: {why}", file=sys.stderr, flush=True)


def _increase(now: Counts, before: Counts) -> Counts:
    """`now - before` for each count, or 0 where the difference is negative."""
    increase: dict[str, Any] = {}
    for name in (f.name for f in fields(Counts)):
        left, right = getattr(now, name), getattr(before, name)
        increase[name] = left - right if isinstance(left, Counter) else max(0, left - right)
    return Counts(**increase)


@dataclass(frozen=True)
class TaskHeartbeat:
    """The last heartbeat of a task: the process that runs it, and its counts."""

    index: int
    task: str
    host: str
    pid: int
    ended: bool
    counts: Counts


def read_heartbeats(run_directory: Path) -> list[TaskHeartbeat]:
    """Reads the heartbeats of all tasks of a run, by task.

    Args:
        run_directory: a directory in `.NAME.job/running`.
    """
    found = []
    for path in sorted(run_directory.glob("[0-9]*.json")):
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # being replaced, on a file system without atomic renames
        counts = values.pop("counts")
        counts = Counts(**(counts | {"dropped": Counter(counts["dropped"])}))
        found.append(TaskHeartbeat(int(path.stem), counts=counts, **values))
    return found


def lost_task_error(name: str, why: str) -> DataError:
    """The error for a task whose every attempt lost its worker."""
    remedy = "if memory ran out, give each task more of it (smaller task_bytes, shard_tokens); run again to resume"
    return DataError(f"{name} did not come back from its workers: {why}\n  try: {remedy}")
