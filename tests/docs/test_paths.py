"""Paths and modules of this repository that pages, scripts and the Makefile name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("pipeline", "data_prep", "headrace", "tests", "benchmarks")
NAMED = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "Dockerfile", ".ci/run")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for folder in ("slurm", "k8s", "demo", "examples") for path in (ROOT / folder).rglob("*")),
)
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)}|ds_configs|slurm|k8s|demo|examples|docs)(?:/[\w.-]+)+/?")
MODULE = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.[a-z_]\w*)+")
# 0040 tells what moved from where, the log what was tried with names of then; the changelog is of the past as a whole
PAST = {"docs/decisions/0040-eleven-wings.md", "docs/decisions/0013-rooms.md", "docs/changelog.md"}
MADE = {
    *(ROOT / "docs" / "sweeps").glob("*.md"),
    *(ROOT / "docs" / name for name in ("config-reference.md", "reference/communication.md")),
}
"""Pages that programs write."""
ELSEWHERE = {"tests/deepspeed"}  # of another repository
KEYS = ("pipeline.stages", "pipeline.activation_checkpoint_interval")
"""Config keys of DeepSpeed's section `pipeline`."""


def texts() -> list[tuple[str, str]]:
    found = [(str(path.relative_to(ROOT)), path) for path in NAMED if path.is_file()]
    return [(name, path.read_text(errors="ignore")) for name, path in found if name not in PAST]


def is_module(name: str) -> bool:
    """A module, or something in one: the longest prefix that is a package has the rest of it as a module or a name."""
    parts = name.split(".")
    for size in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[:size])
        source = path / "__init__.py" if path.is_dir() else next(path.parent.glob(f"{path.name}.[cp]*"), None)
        if source is not None:
            rest = parts[size:]
            return not rest or (source.is_file() and rest[0] in source.read_text())
    return (ROOT / parts[0] / "__init__.py").is_file() and parts[1] in (ROOT / parts[0] / "__init__.py").read_text()


def is_other(name: str) -> bool:
    """A config key, or a file that looks like a module."""
    return name in KEYS or name.endswith((".py", ".sbatch"))


@pytest.mark.parametrize(("name", "text"), texts(), ids=lambda value: value if len(value) < 80 else "text")
def test_what_a_page_or_script_names_exists(name: str, text: str) -> None:
    paths = {found.rstrip("./") for found in PATH.findall(text)}
    absent = [path for path in paths if not list(ROOT.glob(path.replace("NAME", "*") + "*"))]
    absent += [module for module in set(MODULE.findall(text)) if not (is_module(module) or is_other(module))]
    assert set(absent) <= ELSEWHERE, name


def test_pages_are_found() -> None:
    assert len(texts()) > 100
    assert any(PATH.findall(text) for _, text in texts())
    assert not is_module("pipeline.planner.plan")
    assert is_module("pipeline.plan.predict.plan")


@pytest.mark.parametrize("page", [path for path in NAMED if path.suffix == ".md"], ids=lambda path: path.name)
def test_no_line_of_prose_is_over_120_characters(page: Path) -> None:
    prose = "" if page in MADE else re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not re.match(r" *\||    |#|!\[", line)]  # tables, code, headings
    assert [line for line in lines if len(line) > 120] == []
