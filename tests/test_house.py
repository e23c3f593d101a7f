"""The house itself: names that cannot shadow, promises that are true, and a budget of CPU seconds for each folder."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import budget, warm
from tests.budget import Budget, CpuSeconds, budget_of
from tests.conftest import ROOT
from tests.house import classes_defined_twice, contract, measure
from tests.support import output_of


def test_no_module_of_pipeline_has_the_name_of_a_dependency_or_of_the_standard_library() -> None:
    # `python pipeline/train.py` puts pipeline/ first on sys.path: such a name would be imported instead of the real one
    ours = {path.stem for path in (ROOT / "pipeline").iterdir() if path.suffix == ".py" or path.is_dir()}
    taken = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    assert (ours & taken) - {"__pycache__", "__init__", "__main__", "pipeline"} == set()


def test_every_entry_point_answers_help_without_torch() -> None:
    for script in ("train.py", "prune.py", "distill.py", "cache_logits.py", "quantize.py"):
        command = [sys.executable, "-X", "importtime", str(ROOT / "pipeline" / script), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "--config" in done.stdout
        assert "--set" in done.stdout
        assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE), script


def test_every_command_of_pipeline_answers_help() -> None:
    from foundation.verbs import VERBS  # noqa: PLC0415

    for name in (verb.name for verb in VERBS):
        assert "usage: python -m pipeline" in output_of(warm.run("-m", "pipeline", name, "--help"))


def test_every_path_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text()
    rooms = "pipeline|data_prep|headrace|ds_configs|slurm|tests|docs|demo|examples"
    named = re.findall(rf"(?:^|[\s`(])((?:{rooms})/[\w./-]+\.\w+)", text)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_house_has_few_rooms_and_arrows_and_none_upward() -> None:
    found = measure()
    assert len(found.rooms) <= 17
    assert len(found.arrows) <= 60
    assert found.upward(contract()) == {}


def test_arguments_and_attributes_are_described_by_phrases_that_stand_alone() -> None:
    leaning = re.compile(r"^\s+\*{0,2}\w[\w, *]*: (of|that|what|those|as|see)\b", re.MULTILINE)
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    found = [
        f"{path.relative_to(ROOT)}: {line[0].strip()}"
        for package in ("pipeline", "data_prep", "headrace", "foundation", "tests", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
        for line in leaning.finditer(ast.get_docstring(node, clean=False) or "")
    ]
    assert found == []


def test_a_module_that_is_run_defines_everything_before_it_runs() -> None:
    modules = {
        path: ast.parse(path.read_text()).body
        for package in ("pipeline", "data_prep", "headrace", "foundation", "benchmarks", "examples")
        for path in (ROOT / package).rglob("*.py")
    }
    started = {
        path: [ast.unparse(each).startswith("if __name__ ==") for each in body] for path, body in modules.items()
    }
    assert sum(map(any, started.values())) > 20
    assert [path for path, runs in started.items() if any(runs[:-1])] == []


def test_every_package_says_what_is_in_it() -> None:
    files = [
        path
        for package in ("pipeline", "data_prep", "headrace", "foundation")
        for path in (ROOT / package).rglob("__init__.py")
    ]
    assert len(files) > 50
    assert [path for path in files if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_class_name_is_defined_twice() -> None:
    assert classes_defined_twice() == {}


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
