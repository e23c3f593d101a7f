"""The house itself: names that cannot shadow, promises in the README that are true."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys

from tests import warm
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
        for package in ("pipeline", "data_prep", "headrace", "foundation")
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
