"""CPU seconds of tests per folder, printed at the end of a session: the worker's own and those of its children.

A child counts when it has been waited for. Processes that a fork server of `tests.warm_python` has started count with
the test that asked for them; daemons (a Slurm, a pod's processes that outlive their parent) do not count.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

import pytest

from tests import warm_python

ROOMS = 25
"""Folders that are printed; the others are summed up."""


class CpuSeconds:
    """Hooks of pytest, in the workers of xdist and in the process that prints."""

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Adds up what a test took, with its fixtures."""
        before = _spent()
        result = yield
        self.by_file[item.nodeid.partition("::")[0].removeprefix("tests/")] += _spent() - before
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Sends a worker's sums to the process that prints."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = dict(self.by_file)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.by_file.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rooms: Counter[str] = Counter()
        for path, seconds in self.by_file.items():
            rooms[str(PurePath(path).parent)] += seconds
        total = sum(rooms.values())
        if total < 60:
            return
        terminalreporter.section(f"CPU seconds by folder of tests: {total:,.0f}")
        for room, seconds in rooms.most_common(ROOMS):
            longest = max((path for path in self.by_file if str(PurePath(path).parent) == room), key=self.by_file.get)
            name, most = PurePath(longest).name, self.by_file[longest]
            terminalreporter.write_line(f"{seconds:8,.0f}  {room:<34} most: {name} {most:,.0f}")
        if rest := rooms.most_common()[ROOMS:]:
            terminalreporter.write_line(f"{sum(seconds for _, seconds in rest):8,.0f}  {len(rest)} other folders")


def _spent() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used) + warm_python.cpu_seconds()
