"""CPU seconds of tests per folder, children included: printed at the end of a session, limited by `budget.toml`."""

from __future__ import annotations

import os
import resource
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import pytest

from tests import warm_python

ROOMS = 25
"""Folders that are printed; the others are summed up."""


class CpuSeconds:
    """Hooks of pytest, in the workers of xdist and in the process that prints.

    A child counts when it has been waited for. Processes that a fork server of `tests.warm_python` has started count
    with the test that asked for them; daemons (a Slurm, a pod's processes that outlive their parent) do not count. A
    session of a whole tier fails over the budget of all folders where `HEADRACE_KEEP_BUDGET` is set.
    """

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


FILE = Path(__file__).with_name("budget.toml")
TIERS = ("not sweep", "not integration and not sweep")
"""The tests of CI and those of `make test`, in the order of the columns of the file."""
ALLOWED = 1.2
"""How much of its budget a session or a folder may take: as many seconds differ between two runs of the same tests."""


@dataclass(frozen=True)
class Budget:
    """Scaled CPU seconds of a tier.

    Attributes:
        seconds: Folder below tests -> CPU seconds; the tests in tests/ itself are ".".
        scale: Time this machine takes for a fixed loop, as a multiple of that of the machine of the file.
    """

    seconds: Mapping[str, float]
    scale: float = 1.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def is_exceeded(self, taken: Mapping[str, float]) -> bool:
        """Whether all folders together took too long."""
        return sum(taken.values()) > ALLOWED * self.total

    def over(self, taken: Mapping[str, float]) -> list[str]:
        """Folders that took longer than their own budgets and two seconds."""
        return [each for each in taken if taken[each] > ALLOWED * self.seconds.get(each, 0.0) + 2]


def budget_of(config: pytest.Config) -> Budget | None:
    """The budget of a session that runs the whole of a tier; None for any other, and in a worker of xdist."""
    option = config.option
    part = option.keyword or option.deselect or option.ignore or option.collectonly
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not part
    if hasattr(config, "workerinput") or not whole or option.markexpr not in TIERS:
        return None
    table = tomllib.loads(FILE.read_text())
    scale = loop_seconds() / table["loop_seconds"]
    tier = TIERS.index(option.markexpr)
    return Budget({folder: scale * seconds[tier] for folder, seconds in table["cpu_seconds"].items()}, scale)


def loop_seconds() -> float:
    """CPU seconds of a fixed loop of Python and numpy: the least of three rounds of a tenth of a second."""
    import numpy as np  # noqa: PLC0415 - after tests/conftest.py has set the number of its threads

    values = np.random.default_rng(0).random(400_000)
    rounds = []
    for _ in range(3):
        began = time.process_time()
        sum(number * number % 7 for number in range(700_000))
        np.sort(values)
        rounds.append(time.process_time() - began)
    return min(rounds)


if __name__ == "__main__":
    print(f"loop_seconds = {loop_seconds():.3f}")
