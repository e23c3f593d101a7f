"""CPU seconds of tests per folder, printed at the end of a session: the worker's own and those of its children.

A child counts when it has been waited for. Processes that a fork server of `tests.warm_python` has started count with
the test that asked for them; daemons (a Slurm, a pod's processes that outlive their parent) do not count. A session of
a whole tier prints the budget of every folder (`tests.budget`), too, and fails over that of all where
`HEADRACE_KEEP_BUDGET` is set.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

import pytest

from tests import warm_python
from tests.budget import ALLOWED, Budget

ROOMS = 25
"""Folders that are printed; the others are summed up."""


class CpuSeconds:
    """Hooks of pytest, in the workers of xdist and in the process that prints."""

    def __init__(self, budget: Budget | None) -> None:
        self.by_file: Counter[str] = Counter()
        self.budget = budget

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Adds up what a test took, with its fixtures."""
        before = _spent()
        result = yield
        self.by_file[item.nodeid.partition("::")[0].removeprefix("tests/")] += _spent() - before
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Sends a worker's sums to the process that prints; fails a session that exceeds its budget."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = dict(self.by_file)
        elif self._fails() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _fails(self) -> bool:
        kept = "HEADRACE_KEEP_BUDGET" in os.environ
        return kept and self.budget is not None and self.budget.is_exceeded(self._by_folder())

    def _by_folder(self) -> Counter[str]:
        folders: Counter[str] = Counter()
        for path, seconds in self.by_file.items():
            folders[str(PurePath(path).parent)] += seconds
        return folders

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.by_file.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rooms, budget = self._by_folder(), self.budget
        total = sum(rooms.values())
        if total < 60:
            return
        of = f" of {budget.total:,.0f}, on a machine of {budget.scale:.2f} times the loop's time" if budget else ""
        terminalreporter.section(f"CPU seconds by folder of tests: {total:,.0f}{of}")
        for room, seconds in rooms.most_common(ROOMS):
            longest = max((path for path in self.by_file if str(PurePath(path).parent) == room), key=self.by_file.get)
            name, most = PurePath(longest).name, self.by_file[longest]
            of = f" of {budget.seconds.get(room, 0):5,.0f}" if budget else ""
            terminalreporter.write_line(f"{seconds:8,.0f}{of}  {room:<34} most: {name} {most:,.0f}")
        if rest := rooms.most_common()[ROOMS:]:
            terminalreporter.write_line(f"{sum(seconds for _, seconds in rest):8,.0f}  {len(rest)} other folders")
        if budget is None:
            return
        if over := [f"{room} {rooms[room]:,.0f} of {budget.seconds.get(room, 0):,.0f}" for room in budget.over(rooms)]:
            terminalreporter.write_line(f"warning: over their budgets: {', '.join(over)}", yellow=True)
        if budget.is_exceeded(rooms):
            why = f"{total:,.0f} CPU seconds are more than {ALLOWED} times the budget of {budget.total:,.0f}"
            terminalreporter.write_line(
                f"{'error' if self._fails() else 'warning'}: {why}: make tests cheaper, or tests/budget.toml larger",
                red=True,
            )


def _spent() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used) + warm_python.cpu_seconds()
