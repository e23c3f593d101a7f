"""`Executor`: who schedules the tasks of a phase. Tasks are values that pickle, and know nothing of it.

A task may be run twice, by anybody, at the same time: the result is the same and is put in place by one rename. So an
executor may start a second copy of a slow task, and start one again whose machine has gone.
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
from headrace.base.errors import ConfigError, DataError, HeadraceError

_REACH_S = 5.0
_LOOK_S = 1.0


class Executor(Protocol):
    """Runs tasks somewhere. Every machine it uses sees the same files under the same paths."""

    def run(self, tasks: Sequence[Task], *, report: Report) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Runs all of the tasks and yields (task, result) as they finish, in any order.

        Args:
            report: called in this process with the work done since the last call.

        Raises:
            DataError: the first error of a task that running it again would not mend. Tasks that had finished stay so.
        """


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reach(option: str, places: Sequence[str], *, remedy: str) -> None:
    """Finds that one of some HOST:PORT answers: engines try for minutes, and say so in stack traces.

    Raises:
        ConfigError: none does; names the command line's option.
    """
    reasons = []
    for place in places:
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_REACH_S).close()
        except (OSError, ValueError, OverflowError) as error:
            reasons.append(f"{place}: {error}")
        else:
            return
    raise ConfigError(option, ",".join(places), why=f"nothing answers there ({'; '.join(reasons)})", remedy=remedy)


class _OvertakenError(Exception):
    """Somebody else has finished the task."""


def attempt(task: Task, report: Report) -> tuple[str, Any]:
    """Runs a task in a worker: ("done", result), ("error", message for the user) or ("bug", traceback).

    It stops when another attempt at the task has finished, and gives what that one said.
    """
    looked = time.monotonic()

    def report_unless_overtaken(counts: Counts) -> None:
        nonlocal looked
        report(counts)
        if time.monotonic() - looked >= _LOOK_S:
            looked = time.monotonic()
            if task.finished:
                raise _OvertakenError

    try:
        with suppress(_OvertakenError):
            return "done", task.run(report_unless_overtaken)
        return "done", task.run(report)
    except HeadraceError as error:
        return "error", str(error)
    except Exception:
        return "bug", traceback.format_exc()


def raise_failed(name: str, kind: str, value: str) -> None:
    """Raises what `attempt` of the task of that name has returned, unless it is done."""
    if kind == "error":
        raise DataError(value)
    if kind == "bug":
        raise RuntimeError(f"{name} failed:\n{value}")
