"""Every folder of tests has a budget of CPU seconds, and a session says where it is exceeded."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import budget
from tests.budget import Budget, budget_of
from tests.cpu_seconds import CpuSeconds


def test_every_folder_of_tests_has_a_budget_and_every_budget_a_folder() -> None:
    tests = Path(__file__).parent
    folders = {str(path.parent.relative_to(tests)) for path in tests.rglob("test_*.py")}
    assert tomllib.loads(budget.FILE.read_text())["cpu_seconds"].keys() == folders


def session(**options: object) -> SimpleNamespace:
    given = {"markexpr": "not sweep", "keyword": "", "deselect": None, "ignore": None, "collectonly": False, **options}
    whole = pytest.Config.ArgsSource.TESTPATHS
    return SimpleNamespace(option=SimpleNamespace(**given), args_source=given.pop("source", whole))


def test_only_sessions_of_a_whole_tier_have_a_budget() -> None:
    whole, quick = budget_of(session()), budget_of(session(markexpr="not integration and not sweep"))
    assert whole is not None
    assert quick is not None
    assert 0 < quick.total / quick.scale < whole.total / whole.scale
    others = ({"markexpr": ""}, {"keyword": "a"}, {"collectonly": True}, {"source": pytest.Config.ArgsSource.ARGS})
    assert [budget_of(session(**each)) for each in others] == [None] * 4


@pytest.mark.parametrize(("seconds", "kept", "status"), [(121, True, 1), (121, False, 0), (119, True, 0)])
def test_a_session_fails_over_the_whole_budget_alone(
    seconds: float, kept: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_KEEP_BUDGET", "1")
    if not kept:
        monkeypatch.delenv("HEADRACE_KEEP_BUDGET")
    plugin = CpuSeconds(Budget({"data": 90.0, "run": 10.0}))
    plugin.by_file.update({"data/test_a.py": seconds - 60, "run/test_b.py": 60.0})
    ended = SimpleNamespace(config=object(), exitstatus=pytest.ExitCode.OK)
    plugin.pytest_sessionfinish(ended)
    assert ended.exitstatus == status
    lines: list[str] = []
    plugin.pytest_terminal_summary(
        SimpleNamespace(section=lines.append, write_line=lambda line, **_: lines.append(line))
    )
    assert f"CPU seconds by folder of tests: {seconds} of 100" in lines[0]
    assert "warning: over their budgets: run 60 of 10" in lines
    assert sum("121 CPU seconds are more than 1.2 times the budget of 100" in line for line in lines) == (seconds > 120)
