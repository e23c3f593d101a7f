"""`Executor`: the protocol that schedules the tasks of a phase. Tasks are picklable values.

A task may run twice, on any worker, at the same time: the result is the same, and one rename publishes it. So an
executor may run a second attempt at a slow task (speculative execution), and retry a task whose machine is lost.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from data_prep.task import Counts, Report, Task
from foundation.errors import EXIT_LOST, ConfigError, DataError, HeadraceError

_CONNECT_TIMEOUT_S = 5.0
_FINISHED_CHECK_INTERVAL_S = 1.0


class Executor(Protocol):
    """Runs tasks on one or more machines, all of which must see the same files under the same paths."""

    def run(self, tasks: Sequence[Task], *, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Runs all of the tasks and yields (task, result) as they finish, in any order.

        Args:
            report: called in this process with the work done since the last call.

        Raises:
            DataError: the first task error that a retry would not fix. The results of finished tasks are kept.
        """


def default_workers() -> int:
    """Number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_reachable(option: str, addresses: Sequence[str], *, remedy: str) -> None:
    """Checks that at least one of several HOST:PORT accepts a connection.

    The engines themselves retry for minutes and then fail with a stack trace.

    Args:
        option: the command line option to name in the error.

    Raises:
        ConfigError: no address accepts a connection.
    """
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError, OverflowError) as error:
            reasons.append(f"{address}: {error}")
        else:
            return
    why = f"cannot connect to it ({'; '.join(reasons)})"
    raise ConfigError(option, ",".join(addresses), why=why, remedy=remedy)


class LostWorkerError(DataError):
    """A worker was killed. A job script may run the command again with fewer workers."""

    exit_code = EXIT_LOST


class _AlreadyFinishedError(Exception):
    """Raised when another attempt has finished the task."""


def attempt_task(task: Task, report: Report) -> tuple[str, Any]:
    """Runs a task in a worker.

    The attempt stops when another attempt at the same task has finished, and returns the other's result.

    Returns:
        ("done", result), ("error", message for the user) or ("bug", traceback).
    """
    checked = time.monotonic()

    def report_unless_finished(counts: Counts) -> None:
        nonlocal checked
        report(counts)
        if time.monotonic() - checked >= _FINISHED_CHECK_INTERVAL_S:
            checked = time.monotonic()
            if task.finished:
                raise _AlreadyFinishedError

    try:
        with suppress(_AlreadyFinishedError):
            return "done", task.run(report_unless_finished)
        return "done", task.run(report)
    except HeadraceError as error:
        return "error", str(error)
    except Exception:
        return "bug", traceback.format_exc()


def raise_if_failed(name: str, kind: str, value: str) -> None:
    """Raises the error, if any, that `attempt_task` returned for the task with this name."""
    if kind == "error":
        raise DataError(value)
    if kind == "bug":
        raise RuntimeError(f"{name} failed:\n{value}")
