"""Examples of custom training loops: at most four lines differ from the plain loop, and the losses are equal."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import ROOT
from tests.support import output_of

EXAMPLES = ROOT / "examples"
PAIRS = sorted(path.stem for path in EXAMPLES.glob("own_loop*.py") if not path.stem.endswith("_plain"))
ENGINES = ("torch", "deepspeed")


def losses_printed(script: str, *arguments: str, processes: int = 1) -> list[float]:
    said = output_of(warm.run(EXAMPLES / f"{script}.py", *arguments, cwd=ROOT, processes=processes))
    return [float(number) for number in re.findall(r"^(?:loss|evaluated) (\S+)$", said, re.MULTILINE)]


@pytest.fixture(scope="module", params=PAIRS)
def example(request: pytest.FixtureRequest) -> tuple[str, list[float]]:
    """An example, and the losses of its plain loop."""
    name: str = request.param
    return name, losses_printed(f"{name}_plain")


def code(path: Path) -> list[str]:
    """The lines of a script without its docstring and empty lines."""
    _, _, rest = path.read_text().partition('"""\n')
    return [line for line in rest.splitlines() if line.strip()]


def test_every_way_has_an_example() -> None:
    assert PAIRS == ["own_loop", "own_loop_batchnorm", "own_loop_hf"]


@pytest.mark.parametrize("name", PAIRS)
def test_at_most_four_lines_differ_from_the_plain_loop(name: str) -> None:
    delta = list(difflib.ndiff(code(EXAMPLES / f"{name}_plain.py"), code(EXAMPLES / f"{name}.py")))
    assert sum(line.startswith("+ ") for line in delta) == 4, delta
    # what is taken away is replaced: nothing of the plain loop is lost but these two
    assert sum(line.startswith("- ") for line in delta) == 2, delta


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_the_losses_are_those_of_the_plain_loop(example: tuple[str, list[float]], engine: str, processes: int) -> None:
    name, expected = example
    assert len(expected) >= 8
    assert losses_printed(name, "--config", f"examples/{engine}.json", processes=processes) == pytest.approx(
        expected, rel=1e-5
    )


def test_the_docs_show_the_lines_that_differ() -> None:
    page = (ROOT / "docs/how-to/own-loop.md").read_text()
    delta = difflib.ndiff(code(EXAMPLES / "own_loop_plain.py"), code(EXAMPLES / "own_loop.py"))
    for line in delta:
        if line[0] in "+-":
            assert f"{line[0]} {line[2:]}" in page, line
