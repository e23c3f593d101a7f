"""`Executor`: who schedules the tasks of a phase. Tasks are values that pickle, and know nothing of it.

A task may be run twice, by anybody, at the same time: the result is the same and is put in place by one rename. So an
executor may start a second copy of a slow task, and start one again whose machine has gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from data_prep.tasks.base import Report, Task


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
