"""The executor on a Ray cluster: an existing one, or one started on this machine. Each task requests one CPU."""

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

from data_prep.executors.base import check_reachable, default_workers
from data_prep.executors.task_claims import Assignment, TaskClaims, TaskOutcome, execute_assignment, lost_task_error
from data_prep.task import Report, Task
from foundation.errors import ConfigError

SETTINGS = {
    # Ray detects a lost machine after 300 s by default, and after about 10 s with these settings. The head node reads
    # the settings of the health checks: `ray start --head` of an existing cluster needs them, too.
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_RETRIES = 4
_STORE_BYTES = 80_000_000  # for a cluster started here; results are small, and Ray accepts no less than 75 MB
_SLOW_FACTOR = 3.0
"""Multiple of the median duration after which a task gets a speculative second attempt."""
_POLL_S = 0.5
_STOP_S = 10.0


@contextmanager
def open_ray(root: Path, *, workers: int | None, address: str | None) -> Iterator[RayExecutor]:
    """Yields an executor on a Ray cluster.

    Args:
        root: the job directory.
        workers: concurrent tasks; None: the cluster's CPUs, or this process's if a cluster is started here.
        address: address of a cluster, for `ray.init`; None: RAY_ADDRESS, or else a cluster is started here.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # noqa: PLC0415
    except ImportError as error:
        why, remedy = f"Ray is not installed here ({error})", "pip install ray, here and on the workers"
        raise ConfigError("--executor", "ray", why=why, remedy=remedy) from None
    _connect(ray, workers, address or os.environ.get("RAY_ADDRESS"))
    try:
        yield RayExecutor(root, workers)
    finally:
        ray.shutdown()


def _connect(ray: Any, workers: int | None, address: str | None) -> None:
    if address and re.fullmatch(r"[^/]+:\d+", address):
        remedy = "HOST:PORT as `ray start --head` printed it (the default port is 6379)"
        check_reachable("--address", [address], remedy=remedy)
    try:
        if address in (None, "local"):
            cores = {"num_cpus": workers or default_workers(), "object_store_memory": _STORE_BYTES}
            ray.init("local", include_dashboard=False, logging_level="error", log_to_driver=False, **cores)
        else:
            ray.init(address, logging_level="error", log_to_driver=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        option = "--address" if address else "--executor"
        remedy = "`ray status` on this machine has to work; --address HOST:6379, auto, or none to start Ray here"
        raise ConfigError(option, address or "ray", why=_first_line(error), remedy=remedy) from None


@dataclass(frozen=True)
class RayExecutor:
    """Runs tasks on the cluster that this process is connected to.

    Attributes:
        slow_s: seconds before a task may get a speculative second attempt (`_Scheduler.speculate`).
    """

    root: Path
    workers: int | None
    slow_s: float = 10.0

    def run(self, tasks: Sequence[Task], *, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Implements `Executor.run`. A task whose worker or machine is lost is retried, up to four times."""
        if not tasks:
            return
        with TaskClaims(self.root, tasks) as claims:
            scheduler = _Scheduler(deque(claims.assignments()), workers=self.workers, slow_s=self.slow_s)
            while scheduler.unfinished:
                scheduler.start_tasks()
                for index, outcome in scheduler.wait_for_finished():
                    yield claims.finish(index, outcome, report)
                claims.poll(report)
                scheduler.speculate()
        scheduler.wait_for_slower_attempts()


@dataclass
class _Scheduler:
    """Tracks waiting, running and finished tasks, and speculative attempts.

    Attributes:
        running: Ray's object reference of each attempt -> (assignment, start time); a task may have two attempts.
        done: indices of finished tasks.
        speculated: indices of tasks that got a second attempt.
        seconds: durations of finished tasks.
    """

    waiting: deque[Assignment]
    workers: int | None
    slow_s: float
    running: dict[Any, tuple[Assignment, float]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    speculated: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        import ray  # noqa: PLC0415

        self._ray, self._total = ray, len(self.waiting)
        # SPREAD: the default fills one machine before it uses the next, whose disk and network would be idle
        options = {"num_cpus": 1, "max_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
        self._execute = ray.remote(**options)(execute_assignment)

    @property
    def unfinished(self) -> bool:
        """Whether any task has not finished."""
        return len(self.done) < self._total

    def start_tasks(self) -> None:
        """Submits tasks: up to `workers`; without a limit, enough to keep every CPU of a growing cluster busy."""
        limit = self.workers or 2 * int(self._ray.cluster_resources().get("CPU", 1)) + 1
        while self.waiting and len(self.running) < limit:
            self._start(self.waiting.popleft())

    def wait_for_finished(self) -> list[tuple[int, TaskOutcome]]:
        """Index and outcome of tasks that have finished since the last call; waits up to `_POLL_S`."""
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

    def speculate(self) -> None:
        """Starts a second attempt of stragglers (over three times the median duration) once no task waits.

        The first attempt to finish counts.
        """
        if self.waiting or not self.seconds:
            return
        slow = max(self.slow_s, _SLOW_FACTOR * statistics.median(self.seconds))
        for assignment, began in list(self.running.values()):
            if assignment.index not in self.speculated | self.done and time.monotonic() - began > slow:
                self.speculated.add(assignment.index)
                self._start(assignment)

    def wait_for_slower_attempts(self) -> None:
        """Waits up to `_STOP_S` for slower attempts, which stop at their next report once the claims directory is gone.

        `ray.cancel` is not used: if the task ends at the same time, it aborts this process ("Check failed: Tried to
        complete task that was not pending", Ray 2.60; its issue 54260).
        """
        if self.running:
            self._ray.wait(list(self.running), num_returns=len(self.running), timeout=_STOP_S)

    def _start(self, assignment: Assignment) -> None:
        self.running[self._execute.remote(assignment)] = assignment, time.monotonic()

    def _get(self, reference: Any, assignment: Assignment) -> TaskOutcome:
        try:
            outcome: TaskOutcome = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise lost_task_error(assignment.task.name, _first_line(error)) from None
        return outcome


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
