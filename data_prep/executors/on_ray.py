"""The executor on a Ray cluster: one that is there, or one started here. Each task asks for one CPU."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.executors.base import default_workers, reach
from data_prep.executors.task_claims import Assignment, TaskClaims, TaskOutcome, lost, work
from data_prep.task import Report, Task
from headrace.base.errors import ConfigError

SETTINGS = {
    # Without them a machine that goes without a word is noticed after 300 s, with them after about 10. Those of health
    # checks are read by the head: `ray start --head` of a cluster that is not ours needs them, too.
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_RETRIES = 4
_STORE_BYTES = 80_000_000  # of a cluster started here; results are small, and Ray takes no less than 75 MB
_SLOW = 3.0
_POLL_S = 0.5
_STOP_S = 10.0


@contextmanager
def on_ray(root: Path, *, workers: int | None, address: str | None) -> Iterator[Ray]:
    """Gives an executor on a Ray cluster.

    Args:
        root: the job directory.
        workers: how many tasks at once; None: as many as the cluster has CPUs, or this process where one is started.
        address: of a cluster, as `ray.init` takes it; None: RAY_ADDRESS, or else one is started here.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # noqa: PLC0415
    except ImportError as error:
        why, remedy = f"Ray is not installed here ({error})", 'pip install "headrace[ray]", here and on the workers'
        raise ConfigError("--executor", "ray", why=why, remedy=remedy) from None
    _connect(ray, workers, address or os.environ.get("RAY_ADDRESS"))
    try:
        yield Ray(root, workers)
    finally:
        ray.shutdown()


def _connect(ray: Any, workers: int | None, address: str | None) -> None:
    if address and re.fullmatch(r"[^/]+:\d+", address):
        reach("--address", [address], remedy="HOST:PORT as `ray start --head` has said it (6379 is its default)")
    try:
        if address in (None, "local"):
            cores = {"num_cpus": workers or default_workers(), "object_store_memory": _STORE_BYTES}
            ray.init("local", include_dashboard=False, logging_level="error", log_to_driver=False, **cores)
        else:
            ray.init(address, logging_level="error", log_to_driver=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = "--address" if address else "--executor"
        remedy = "`ray status` on this machine has to work; --address HOST:6379, auto, or none to start Ray here"
        raise ConfigError(where, address or "ray", why=_first_line(error), remedy=remedy) from None


@dataclass(frozen=True)
class Ray:
    """Tasks on the cluster that this process is connected to. slow_s: see `_Flight.copy_slow`."""

    root: Path
    workers: int | None
    slow_s: float = 10.0

    def run(self, tasks: Sequence[Task], *, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
        """See `Executor.run`. A task whose worker or machine goes is started again, up to four times."""
        if not tasks:
            return
        with TaskClaims(self.root, tasks) as board:
            flight = _Flight(deque(board.assignments()), workers=self.workers, slow_s=self.slow_s)
            while flight.going:
                flight.fill()
                for index, outcome in flight.landed():
                    yield board.finished(index, outcome, report)
                board.poll(report)
                flight.copy_slow()
        flight.wait_for_copies()


@dataclass
class _Flight:
    """Which tasks wait, run and have run. Ray's references stand for attempts; a task may have two."""

    waiting: deque[Assignment]
    workers: int | None
    slow_s: float
    running: dict[Any, tuple[Assignment, float]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        import ray  # noqa: PLC0415

        self._ray, self._total = ray, len(self.waiting)
        # SPREAD: the default fills one machine before it takes the next, and these tasks share its disk and network
        options = {"num_cpus": 1, "max_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
        self._work = ray.remote(**options)(work)

    @property
    def going(self) -> bool:
        """Whether a task has not finished."""
        return len(self.done) < self._total

    def fill(self) -> None:
        """Hands out tasks: as many as may run, or enough that no CPU of a growing cluster is without."""
        limit = self.workers or 2 * int(self._ray.cluster_resources().get("CPU", 1)) + 1
        while self.waiting and len(self.running) < limit:
            self._start(self.waiting.popleft())

    def landed(self) -> list[tuple[int, TaskOutcome]]:
        """What has finished since the last call; waits a moment for it."""
        ready, _ = self._ray.wait(list(self.running), num_returns=len(self.running), timeout=_POLL_S)
        found = []
        for reference in ready:
            assignment, _ = self.running.pop(reference)
            if assignment.index in self.done:
                continue
            outcome = self._get(reference, assignment)
            self.done.add(assignment.index)
            self.seconds.append(outcome.seconds)
            found.append((assignment.index, outcome))
        return found

    def copy_slow(self) -> None:
        """Starts a second copy of tasks that take three times the usual, once none waits. The first to end counts."""
        if self.waiting or not self.seconds:
            return
        slow = max(self.slow_s, _SLOW * statistics.median(self.seconds))
        for assignment, began in list(self.running.values()):
            if assignment.index not in self.copied | self.done and time.monotonic() - began > slow:
                self.copied.add(assignment.index)
                self._start(assignment)

    def wait_for_copies(self) -> None:
        """Waits for copies that were slower; without a board they stop at their next report.

        `ray.cancel` is not used: where the task ends at the same time, it aborts this process ("Check failed: Tried to
        complete task that was not pending", Ray 2.60; its issue 54260).
        """
        if self.running:
            self._ray.wait(list(self.running), num_returns=len(self.running), timeout=_STOP_S)

    def _start(self, assignment: Assignment) -> None:
        self.running[self._work.remote(assignment)] = assignment, time.monotonic()

    def _get(self, reference: Any, assignment: Assignment) -> TaskOutcome:
        try:
            outcome: TaskOutcome = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise lost(assignment.task.name, _first_line(error)) from None
        return outcome


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
