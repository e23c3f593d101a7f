"""The executor on Spark: one that the user's own settings name, or Spark's local mode. One task is one partition.

Spark starts tasks again whose executor has gone, and second copies of slow ones; both are its own doing.
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

from data_prep.executors.base import default_workers, reach
from data_prep.executors.task_claims import Assignment, TaskClaims, TaskOutcome, lost, work
from data_prep.task import Report, Task
from headrace.base.errors import ConfigError

_DEFAULTS = {
    "spark.app.name": "headrace data_prep",
    "spark.speculation": "true",
    "spark.task.maxFailures": "5",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_POLL_S = 0.5


@contextmanager
def on_spark(root: Path, *, workers: int | None, address: str | None) -> Iterator[Spark]:
    """Gives an executor on Spark. What Spark's own settings say (spark-defaults.conf, PYSPARK_SUBMIT_ARGS) holds.

    Args:
        root: the job directory.
        workers: how many tasks at once, in local and standalone mode; None: all there is.
        address: Spark's master; None: what the settings say, or else local mode.

    Raises:
        ConfigError: Spark or Java is not installed, or the master cannot be reached.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        import pyspark  # noqa: PLC0415
    except ImportError as error:
        why, remedy = f"Spark is not installed here ({error})", 'pip install "headrace[spark]", and Java 17 or newer'
        raise ConfigError("--executor", "spark", why=why, remedy=remedy) from None
    warnings.filterwarnings("ignore", module="pyspark")  # of the versions of libraries that are not used here
    context = _start(pyspark, workers, address)
    try:
        yield Spark(context, root)
    finally:
        context.stop()


def _start(pyspark: Any, workers: int | None, address: str | None) -> Any:
    try:
        conf = _configured(pyspark.SparkConf(), workers, address)
        return pyspark.SparkContext(conf=conf)
    except ConfigError:
        raise
    except Exception as error:
        why = f"Spark does not start: {_cause(error)}"
        remedy = "Java 17 or newer on PATH or in JAVA_HOME, and a master that this machine reaches"
        raise ConfigError("--executor", "spark", why=why, remedy=remedy) from None


def _configured(conf: Any, workers: int | None, address: str | None) -> Any:
    for name, value in _DEFAULTS.items():
        conf.setIfMissing(name, value)
    if address:
        conf.setMaster(address)
    # the 5 as spark.task.maxFailures, which local mode does not read
    conf.setIfMissing("spark.master", f"local[{workers or default_workers()},5]")
    master = conf.get("spark.master")
    if workers and not master.startswith("local["):
        if not master.startswith(("spark://", "local-cluster")):
            why = f"{master} shares out machines by Spark's own settings"
            raise ConfigError("--workers", workers, why=why, remedy="spark.executor.instances and spark.executor.cores")
        conf.set("spark.cores.max", str(workers))
    if master.startswith("spark://"):
        places = master.removeprefix("spark://").split(",")
        reach("--address", places, remedy="the URL that the master's page shows")
    return conf


@dataclass(frozen=True)
class Spark:
    """Tasks on the Spark application of this process."""

    context: Any
    root: Path

    def run(self, tasks: Sequence[Task], *, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
        """See `Executor.run`. Results come together at the end of a phase; `report` is called all the time."""
        if not tasks:
            return
        with TaskClaims(self.root, tasks) as board:
            collected = _Collected(self.context, board.assignments())
            try:
                while collected.wait(_POLL_S):
                    board.poll(report)
            finally:
                collected.cancel()
            for index, outcome in enumerate(collected.outcomes()):
                yield board.finished(index, outcome, report)


class _Collected:
    """A Spark job that runs in a thread, so that this one can look at how far it is."""

    def __init__(self, context: Any, assignments: list[Assignment]) -> None:
        from pyspark import InheritableThread  # noqa: PLC0415

        self._context, self._assignments = context, assignments
        self._outcomes: list[TaskOutcome] | None = None
        self._error: BaseException | None = None
        self._group = assignments[0].run.name
        self._thread: threading.Thread = InheritableThread(target=self._collect)
        self._thread.daemon = True
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits a moment; returns whether it still runs."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def cancel(self) -> None:
        """Ends it if it still runs."""
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)

    def outcomes(self) -> list[TaskOutcome]:
        """One for each assignment, in order."""
        if self._error is not None:
            why = _cause(self._error)
            found = re.search(r"Task (\d+) in stage", why)
            raise lost(self._assignments[int(found[1])].task.name if found else "a task", why) from None
        assert self._outcomes is not None
        return self._outcomes

    def _collect(self) -> None:
        try:
            self._context.setJobGroup(self._group, "headrace data_prep", interruptOnCancel=True)
            parts = self._context.parallelize(self._assignments, len(self._assignments))
            self._outcomes = parts.map(work).collect()
        except BaseException as error:  # raised in the thread that waits
            self._error = error


def _cause(error: BaseException) -> str:
    """The line of an error that says something: of Python's last, where it was raised on a worker."""
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage() if java is not None else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    at = next((i for i, line in enumerate(lines) if line.startswith("Traceback")), None)
    if at is not None:
        raised = [line for line in lines[at:] if ": " in line and not line.startswith(("at ", "File ", "Driver"))]
        return raised[0] if raised else lines[0]
    return lines[0] if lines else type(error).__name__
