"""The executor on Spark: the master of the user's settings, or local mode. Each task is one partition.

Spark itself retries tasks whose Spark executor is lost, and runs slow tasks a second time (speculative execution).
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.executors.base import check_reachable, default_workers
from data_prep.executors.task_claims import Assignment, TaskClaims, TaskOutcome, execute_assignment, lost_task_error
from data_prep.task import Report, Task
from foundation.errors import ConfigError

_DEFAULTS = {
    "spark.app.name": "headrace data_prep",
    "spark.speculation": "true",
    "spark.task.maxFailures": "5",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_POLL_S = 0.5


@contextmanager
def open_spark(root: Path, *, workers: int | None, address: str | None) -> Iterator[SparkExecutor]:
    """Yields an executor on Spark. Spark's own settings (spark-defaults.conf, PYSPARK_SUBMIT_ARGS) apply.

    Args:
        root: the job directory.
        workers: concurrent tasks, in local and standalone mode; None: all CPUs.
        address: Spark's master; None: the settings' master, or else local mode.

    Raises:
        ConfigError: Spark or Java is not installed, or the master cannot be reached.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        import pyspark  # noqa: PLC0415
    except ImportError as error:
        why, remedy = f"Spark is not installed here ({error})", "pip install pyspark, and Java 17 or newer"
        raise ConfigError("--executor", "spark", why=why, remedy=remedy) from None
    warnings.filterwarnings("ignore", module="pyspark")  # about versions of unused libraries
    context = _start(pyspark, workers, address)
    try:
        yield SparkExecutor(context, root)
    finally:
        context.stop()


def _start(pyspark: Any, workers: int | None, address: str | None) -> Any:
    try:
        conf = _configure(pyspark.SparkConf(), workers, address)
        return pyspark.SparkContext(conf=conf)
    except ConfigError:
        raise
    except Exception as error:
        why = f"Spark does not start: {_root_cause(error)}"
        remedy = "Java 17 or newer on PATH or in JAVA_HOME, and a master that this machine reaches"
        raise ConfigError("--executor", "spark", why=why, remedy=remedy) from None


def _configure(conf: Any, workers: int | None, address: str | None) -> Any:
    for name, value in _DEFAULTS.items():
        conf.setIfMissing(name, value)
    if address:
        conf.setMaster(address)
    # 5: the same as spark.task.maxFailures, which local mode does not read
    conf.setIfMissing("spark.master", f"local[{workers or default_workers()},5]")
    master = conf.get("spark.master")
    if workers and not master.startswith("local["):
        if not master.startswith(("spark://", "local-cluster")):
            why = f"{master} allocates machines by Spark's own settings"
            raise ConfigError("--workers", workers, why=why, remedy="spark.executor.instances and spark.executor.cores")
        conf.set("spark.cores.max", str(workers))
    if master.startswith("spark://"):
        addresses = master.removeprefix("spark://").split(",")
        check_reachable("--address", addresses, remedy="the URL that the master's page shows")
    return conf


@dataclass(frozen=True)
class SparkExecutor:
    """Runs tasks in the Spark application of this process."""

    context: Any
    root: Path

    def run(self, tasks: Sequence[Task], *, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Implements `Executor.run`. All results come at the end of a phase; `report` is called while it runs."""
        if not tasks:
            return
        with TaskClaims(self.root, tasks) as claims:
            job = _SparkJob(self.context, claims.assignments())
            try:
                while job.wait(_POLL_S):
                    claims.poll(report)
            finally:
                job.cancel()
            for index, outcome in enumerate(job.outcomes()):
                yield claims.finish(index, outcome, report)


class _SparkJob:
    """A Spark job; a separate thread waits for it, and the caller can poll its progress."""

    def __init__(self, context: Any, assignments: list[Assignment]) -> None:
        from pyspark import InheritableThread  # noqa: PLC0415

        self._context, self._assignments = context, assignments
        self._outcomes: list[TaskOutcome] | None = None
        self._error: BaseException | None = None
        self._group = assignments[0].run_directory.name
        self._thread: threading.Thread = InheritableThread(target=self._collect)
        self._thread.daemon = True
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds`; returns whether the job still runs."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def cancel(self) -> None:
        """Cancels the job if it still runs."""
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)

    def outcomes(self) -> list[TaskOutcome]:
        """The outcome of each assignment, in order."""
        if self._error is not None:
            why = _root_cause(self._error)
            found = re.search(r"Task (\d+) in stage", why)
            raise lost_task_error(self._assignments[int(found[1])].task.name if found else "a task", why) from None
        assert self._outcomes is not None
        return self._outcomes

    def _collect(self) -> None:
        try:
            self._context.setJobGroup(self._group, "headrace data_prep", interruptOnCancel=True)
            parts = self._context.parallelize(self._assignments, len(self._assignments))
            self._outcomes = parts.map(execute_assignment).collect()
        except BaseException as error:  # `outcomes` raises it, in the caller's thread
            self._error = error


def _root_cause(error: BaseException) -> str:
    """The line of an error message that names the cause: the Python exception if it was raised on a worker."""
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage() if java is not None else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    at = next((i for i, line in enumerate(lines) if line.startswith("Traceback")), None)
    if at is not None:
        raised = [line for line in lines[at:] if ": " in line and not line.startswith(("at ", "File ", "Driver"))]
        return raised[0] if raised else lines[0]
    return lines[0] if lines else type(error).__name__
