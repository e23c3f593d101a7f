"""Paths and modules that pages, scripts and the Makefile name exist; messages that pages quote are in the source."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from foundation.config_kinds import KINDS, keys
from tests.conftest import ROOT

PACKAGES = ("pipeline", "data_prep", "headrace", "foundation", "tests", "benchmarks", "examples")
NAMED = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "Makefile", "Dockerfile", ".ci/run")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for folder in ("slurm", "k8s", "demo", "examples") for path in (ROOT / folder).rglob("*")),
)
FOLDERS = (*PACKAGES, "ds_configs", "slurm", "k8s", "demo", "docs")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})(?:/[\w.-]+)+/?")
SOURCE = re.compile(r"(?<![\w./${-])(?:[\w.-]+/)*\w+\.(?:py|sbatch)\b")
MODULE = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.[a-z_]\w*)+")
# 0040 tells what moved from where, the log what was tried with names of then; the changelog is of the past as a whole
PAST = {"docs/decisions/0040-eleven-wings.md", "docs/decisions/0013-rooms.md", "docs/changelog.md"}
ELSEWHERE = ("tests/deepspeed", "examples/deepspeed", "deepspeed/", "torch/", "torchao/", "partition_parameters.py")
"""Paths of other repositories begin so."""
OTHER = {"data.sbatch", "run/trainer.py"}  # written by a submission; a breakpoint, which pdb looks up beside train.py
KEYS = ("pipeline.stages", "pipeline.activation_checkpoint_interval")
"""Config keys of DeepSpeed's section `pipeline`."""


def texts() -> list[tuple[str, str]]:
    found = [(str(path.relative_to(ROOT)), path) for path in NAMED if path.is_file()]
    named = [(name, path) for name, path in found if name not in PAST and path.suffix != ".pyc"]
    return [(name, path.read_text(errors="ignore")) for name, path in named]


def is_path(name: str) -> bool:
    """A file or folder of the repository, or with NAME one name for several."""
    return any(ROOT.glob(name.replace("NAME", "*")))


@cache
def file_names() -> frozenset[str]:
    """Names of the files in all folders of sources."""
    return frozenset(path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*"))


@cache
def names_in(source: Path) -> frozenset[str]:
    """What a module defines or imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def is_module(name: str) -> bool:
    """A package or module, or names that the module with the longest name among its prefixes has."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        path, rest = ROOT.joinpath(*parts[:size]), parts[size:]
        sources = (path.with_suffix(".py"), path.with_suffix(".pyi"), path / "__init__.py")
        for source in sources:
            if source.is_file():
                return set(rest) <= names_in(source)
        if path.is_dir():
            return not rest
    return False


def is_other(name: str) -> bool:
    """A config key, or a file that looks like a module."""
    return name in KEYS or name.endswith((".py", ".sbatch"))


def absent(text: str) -> set[str]:
    """Paths, names of source files and modules that a text names and the repository does not have."""
    paths = {found.rstrip("./") for found in PATH.findall(text)}
    unknown = {name for name in paths if not is_path(name)}
    unknown |= {name for name in SOURCE.findall(text) if not (is_path(name) if "/" in name else name in file_names())}
    unknown |= {name for name in MODULE.findall(text) if not (is_module(name) or is_other(name))}
    written = set(re.findall(r"> (\w+\.py)", text))  # by commands of the page
    return {name for name in unknown - written - OTHER if not name.startswith(ELSEWHERE)}


def test_what_pages_and_scripts_name_exists() -> None:
    found = texts()
    assert len(found) > 100
    assert any(PATH.findall(text) for _, text in found)
    assert {name: unknown for name, text in found if (unknown := absent(text))} == {}


@pytest.mark.parametrize(
    "name",
    [
        *("pipeline/plan/predict/pla", "pipeline/train.p", "parallel/stages.py", "no_such_file.py"),
        *("pipeline.plan.predict.pla", "pipeline.planner.plan", "headrace.loa", "pipeline.own_loop.prepar"),
    ],
)
def test_what_does_not_exist_is_found_exactly(name: str) -> None:
    assert absent(f"see `{name}` there") == {name}


@pytest.mark.parametrize("name", ["pipeline/plan/", "config.py", "pipeline.plan.predict.plan", "headrace.load"])
def test_what_exists_is_not_found_absent(name: str) -> None:
    assert absent(f"see `{name}`.") == set()


def test_no_line_of_prose_is_over_120_characters() -> None:
    found = []
    for page in (path for path in NAMED if path.suffix == ".md"):
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        lines = [line for line in prose.splitlines() if not re.match(r" *\||    |#|!\[", line)]  # no prose
        found += [f"{page.name}: {line}" for line in lines if len(line) > 120]
    assert found == []


def test_modules_that_docstrings_name_exist() -> None:
    """A dotted name is looked for below every package of its file; where none has its first part, it is no module."""
    named = re.compile(r"`([a-z_]\w*(?:\.[a-z_]\w*)+)`")
    config = {".".join(key.path.replace("[]", "").split(".")[:2]) for kind in KINDS for key in keys(kind)}
    others = {"dcp.save", "config._experts_implementation", "engine.generate"}  # torch's, transformers', an attribute
    found = set()
    for path in (path for package in PACKAGES[:4] for path in (ROOT / package).rglob("*.py")):
        folder = path.relative_to(ROOT).parts[:-1]
        names = {name for text in docstrings(path) for name in named.findall(text)}
        for name in names - others:
            first, _, rest = name.partition(".")
            if f"{first}.{rest.partition('.')[0]}" in config or rest.endswith(("py", "jsonl", "npz", "model")):
                continue
            places = [ROOT.joinpath(*folder[:depth], first) for depth in range(len(folder) + 1)]
            here = [place for place in places if place.is_dir() or place.with_suffix(".py").is_file()]
            modules = [".".join(place.relative_to(ROOT).parts) + f".{rest}" for place in here]
            if here and not any(is_module(module) for module in modules):
                found.add((str(path.relative_to(ROOT)), name))
    assert found == set()


def docstrings(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node, clean=False) or "" for node in nodes if isinstance(node, kinds)]


PAGES = sorted((ROOT / "docs").glob("*/*.md"))
_HEADING = "## What can go wrong"
_FEWEST = 40
"""A page that paraphrases its messages instead of quoting them would pass the other test."""


def quoted_messages(page: Path) -> list[str]:
    """The texts in double quotes in the first column of a page's table of messages; `...` stands for a value."""
    section = page.read_text().partition(_HEADING)[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    # quotation marks inside of code belong to a config
    return [text for cell in cells for text in re.findall(r'"([^"]+)"', re.sub(r"`[^`]*\"[^`]*`", "", cell))]


@cache
def source_text() -> str:
    """All string literals of the source, without docstrings, one a line; values in f-strings become a line break."""
    folders = (ROOT / name for name in ("headrace", "foundation", "data_prep", "pipeline", "examples"))
    trees = [ast.parse(file.read_text()) for folder in folders for file in sorted(folder.rglob("*.py"))]
    return "\n".join(line for tree in trees for line in _literals(tree))


def _literals(tree: ast.AST) -> list[str]:
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    joined = [_joined(node) for node in nodes if isinstance(node, ast.JoinedStr)]
    return [node.value for node in found if isinstance(node.value, str)] + joined


def _joined(node: ast.JoinedStr) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "\n" for part in node.values)


def test_quoted_messages_occur_in_the_source() -> None:
    quoted = [(page, message) for page in PAGES for message in quoted_messages(page)]
    assert len(quoted) >= _FEWEST
    for page, message in quoted:
        parts = [part.strip(" ,:()") for part in message.split("...")]
        assert max(map(len, parts)) > 5, f"{page.name}: '{message}' has no literal part to look for"
        absent = [part for part in parts if part not in source_text()]
        assert not absent, f"{page.name} quotes '{message}', and no message has '{absent[0]}'"


def test_every_table_of_messages_quotes_one() -> None:
    """A table whose first column is headed `message` has at least one real message to search for."""
    tables = [page for page in PAGES if f"{_HEADING}\n\n| message |" in page.read_text()]
    assert tables
    assert [page.name for page in tables if not quoted_messages(page)] == []


def test_no_page_and_no_message_installs_headrace_from_an_index_that_does_not_have_it() -> None:
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path != Path(__file__)]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    index = re.compile(r"headrace\[|pip3? install ['\"]?headrace(?! @)\b")
    assert [path for path in (*sources, *pages) if path.name != "changelog.md" and index.search(path.read_text())] == []


def test_the_page_on_installing_has_every_extra_with_its_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs/how-to/install.md").read_text().partition("## Optional packages")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| `")]
    listed = {name: row[1] for row in rows for name in re.findall(r"`([\w-]+)`", row[0])}
    assert listed.keys() == extras.keys()
    for name, packages in extras.items():
        wanted = {re.split(r"[>=\[]", package)[0] for package in packages}
        assert name == "dev" or wanted <= set(re.split(r", ", listed[name])), name


def test_the_readme_is_read_in_two_minutes() -> None:
    """480 words of prose at 240 words a minute, in sentences of at most 20 words on average, none above 30."""
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if not re.match(r"    |\||#|!", line)]
    prose = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    sentences = [len(each.split()) for each in re.split(r"(?<=[.:!?])\s+|\n\n", prose) if len(each.split()) > 2]
    assert sum(sentences) <= 480
    assert sum(sentences) / len(sentences) <= 20
    assert max(sentences) <= 30
