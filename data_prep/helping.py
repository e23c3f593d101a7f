"""A share of a phase that has done its own tasks helps the others: it runs tasks that wait, and copies slow ones.

Shares talk to each other through the file system alone: a finished task has left its result, and one that is being
worked on a scratch file. A task that two have begun is whole whoever is first, and the other stops when it sees that
(see `executors.base.attempt`). Whether a task is slow is told by this process's own clock.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.executors.base import Executor
from data_prep.tasks.base import Report, Task
from headrace.errors import DataError

_SLOW = 3.0
_SLOW_S = 10.0
_POLL_S = 1.0
_SCRATCH = re.compile(r"\.(?P<name>.+)\.(?P<attempt>[0-9a-f]{12})\.partial")


@dataclass
class Helper:
    """Helps with the tasks of a phase.

    Args:
        tasks: all of the phase, in the order in which to help; each share's should be another.
        workers: how many tasks the executor runs at once.
        usual_s: how long a task takes; None: unknown. One that takes three times that is slow, if it takes `slow_s`.
    """

    tasks: Sequence[Task]
    workers: int
    usual_s: float | None
    slow_s: float = _SLOW_S
    _seen: dict[str, float] = field(default_factory=dict)

    def run(self, executor: Executor, report: Report) -> int:
        """Helps until every task is finished or has been begun twice; returns how many tasks it finished.

        What cannot be done is left to the share that it belongs to, which says why.
        """
        done, left = 0, self.tasks
        while left := [task for task in left if not task.finished]:
            begun = _begun(left)
            useful = self._useful(left, begun)
            if useful:
                try:
                    done += sum(1 for _ in executor.run(useful[: self.workers], report=report))
                except DataError as error:
                    print(f"helping ends: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                    return done
            elif all(len(begun[str(task.final)]) > 1 for task in left):
                return done
            else:
                time.sleep(_POLL_S)
        return done

    def _useful(self, left: Sequence[Task], begun: dict[str, set[str]]) -> list[Task]:
        """The tasks that nobody has begun; or, where there are none, those that one has and that take long."""
        if fresh := [task for task in left if not begun[str(task.final)]]:
            return fresh
        slow, now = max(self.slow_s, _SLOW * (self.usual_s or 0.0)), time.monotonic()
        once = [task for task in left if len(begun[str(task.final)]) == 1]
        return [task for task in once if now - self._seen.setdefault(str(task.final), now) > slow]


def _begun(tasks: Sequence[Task]) -> dict[str, set[str]]:
    """For each task's `final`, who has begun it and not finished, or was killed."""
    found: dict[str, set[str]] = defaultdict(set)
    for parent in {task.final.parent for task in tasks}:
        for path in _listed(parent):
            if match := _SCRATCH.match(path.name):
                found[str(parent / match["name"])].add(match["attempt"])
    return found


def _listed(parent: Path) -> list[Path]:
    try:
        return list(parent.iterdir())
    except FileNotFoundError:
        return []
