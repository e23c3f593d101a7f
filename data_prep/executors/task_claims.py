"""What executors on several machines share: a directory of the job in which workers say how far they are.

    .NAME.job/running/RUN/00007.json       how far task 7 is, rewritten every second
    .NAME.job/running/RUN/00007.failed     why it cannot be done

The engine carries tasks out and results back; this carries what engines have no way for while a task runs, and looks
the same under each of them. A worker that does not find `RUN` is on a machine that does not see the job, or its
coordinator has gone on without it: it does nothing, or stops.
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

from data_prep.executors.base import attempt, raise_failed
from data_prep.task import Counts, Report, Task, os_errors_as_data_errors
from headrace.base.errors import DataError, HeadraceError

_EVERY_S = 1.0
_PATIENCE_S = 60.0
RUNNING = "running"


@dataclass(frozen=True)
class TaskOutcome:
    """What came of a task. kind, value: see `attempt`; seconds: it took on the worker."""

    kind: str
    value: Any
    counts: Counts
    seconds: float


@dataclass(frozen=True)
class Assignment:
    """Task number `index` of a run, as it travels to a worker. cwd: what its relative paths start from."""

    index: int
    task: Task
    cwd: Path
    run: Path
    coordinator: str

    def work(self) -> TaskOutcome:
        """Runs the task and tells the coordinator how far it is. For the worker; it changes its working directory."""
        began = time.monotonic()
        if not self.cwd.is_dir() or not self.run.is_dir():
            return TaskOutcome("error", self._unseen(), Counts(), 0.0)
        os.chdir(self.cwd)
        beat = _HeartbeatWriter(self)
        kind, value = attempt(self.task, beat.add)
        beat.write(ended=True)
        if kind != "done":
            _put(self.run, f"{self.index:05d}.failed", json.dumps([kind, value]))
        return TaskOutcome(kind, value, beat.counts, time.monotonic() - began)

    def _unseen(self) -> str:
        absent = self.cwd if not self.cwd.is_dir() else self.run
        return (
            f"{socket.gethostname()} does not see {absent} of {self.coordinator}, which runs the job\n"
            "  try: put the config's paths on a file system that all machines mount under the same path"
        )


def work(assignment: Assignment) -> TaskOutcome:
    """`Assignment.work`, as a function that pickles by its name."""
    return assignment.work()


class _HeartbeatWriter:
    """A task's counts so far, on disk once a second and at its start."""

    def __init__(self, assignment: Assignment) -> None:
        self.counts = Counts()
        self._assignment = assignment
        self.write()

    def add(self, counts: Counts) -> None:
        self.counts = self.counts + counts
        if time.monotonic() - self._written >= _EVERY_S and not self.write():
            raise HeadraceError(f"{self._assignment.task.name} was given up by its coordinator")

    def write(self, *, ended: bool = False) -> bool:
        """Returns whether there is still somebody to read it."""
        self._written = time.monotonic()
        who = {"task": self._assignment.task.name, "host": socket.gethostname(), "pid": os.getpid(), "ended": ended}
        counts = {f.name: getattr(self.counts, f.name) for f in fields(Counts)}
        text = json.dumps(who | {"counts": counts})
        return _put(self._assignment.run, f"{self._assignment.index:05d}.json", text)


def _put(directory: Path, name: str, text: str) -> bool:
    """Writes a file whole; returns whether the directory is there. Reports are not worth failing for."""
    scratch = directory / f".{name}.{uuid.uuid4().hex[:12]}"
    try:
        scratch.write_text(text)
        scratch.rename(directory / name)
    except OSError:
        return directory.is_dir()
    return True


@dataclass
class TaskClaims:
    """The coordinator's side, for one phase; use it as a context manager. root: the job directory."""

    root: Path
    tasks: Sequence[Task]
    _seen: dict[int, Counts] = field(default_factory=dict)
    """By task, the most that any attempt at it has counted: what is lost and done again is not counted again."""

    def __enter__(self) -> TaskClaims:
        parent = self.root.absolute() / RUNNING
        self._run = parent / uuid.uuid4().hex[:12]
        self._polled, self._began = 0.0, time.monotonic()
        with os_errors_as_data_errors(f"making {parent}"):
            shutil.rmtree(parent, ignore_errors=True)  # of coordinators that were killed: their workers stop
            self._run.mkdir(parents=True)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        shutil.rmtree(self._run.parent, ignore_errors=True)

    def assignments(self) -> list[Assignment]:
        """The tasks, as they travel."""
        here = Path.cwd()
        host = socket.gethostname()
        return [Assignment(i, task, here, self._run, host) for i, task in enumerate(self.tasks)]

    def poll(self, report: Report) -> None:
        """Reports what running tasks have done since the last call; looks at most once a second.

        Raises:
            DataError: a task cannot be done.
        """
        if time.monotonic() - self._polled < _EVERY_S:
            return
        self._polled = time.monotonic()
        for path in self._run.glob("[0-9]*.failed"):
            task = self.tasks[int(path.stem)]
            if not task.finished:  # or else another attempt at it went well
                raise_failed(task.name, *json.loads(path.read_text()))
        for beat in read_heartbeats(self._run):
            self._count(beat.index, beat.counts, report)
            if beat.ended:  # so that there are never more to read than tasks that run
                (self._run / f"{beat.index:05d}.json").unlink(missing_ok=True)
        self._say_when_nothing_starts()

    def finished(self, index: int, outcome: TaskOutcome, report: Report) -> tuple[Task, dict[str, Any]]:
        """Reports what is left to report of a task; returns it and its result.

        Raises:
            DataError: it cannot be done.
        """
        raise_failed(self.tasks[index].name, outcome.kind, outcome.value)
        self._count(index, outcome.counts, report)
        return self.tasks[index], outcome.value

    def _count(self, index: int, counts: Counts, report: Report) -> None:
        before = self._seen.get(index, Counts())
        more = _beyond(counts, before)
        self._seen[index] = before + more
        if more != Counts():
            report(more)

    def _say_when_nothing_starts(self) -> None:
        if self._seen or time.monotonic() - self._began < _PATIENCE_S:
            return
        self._began = time.monotonic()
        why = f"no task has started for {_PATIENCE_S:.0f} s: the cluster may be busy, or its free machines too small"
        print(f"waiting: {why}", file=sys.stderr, flush=True)


def _beyond(now: Counts, before: Counts) -> Counts:
    """What `now` has more than `before`, and nothing where it has less."""
    more: dict[str, Any] = {}
    for name in (f.name for f in fields(Counts)):
        left, right = getattr(now, name), getattr(before, name)
        more[name] = left - right if isinstance(left, Counter) else max(0, left - right)
    return Counts(**more)


@dataclass(frozen=True)
class TaskHeartbeat:
    """How far a task was when its worker last said."""

    index: int
    task: str
    host: str
    pid: int
    ended: bool
    counts: Counts


def read_heartbeats(run: Path) -> list[TaskHeartbeat]:
    """What the workers of a run have said, by task; `run` is a directory in `.NAME.job/running`."""
    found = []
    for path in sorted(run.glob("[0-9]*.json")):
        try:
            said = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # replaced in this moment, on a file system that cannot do it whole
        counts = said.pop("counts")
        found.append(
            TaskHeartbeat(int(path.stem), counts=Counts(**(counts | {"dropped": Counter(counts["dropped"])})), **said)
        )
    return found


def lost(name: str, why: str) -> DataError:
    """The error of a task that has not come back from any of the workers that were given it."""
    remedy = "if memory ran out, give each task more of it (smaller task_bytes, shard_tokens); run again to resume"
    return DataError(f"{name} did not come back from its workers: {why}\n  try: {remedy}")
