"""Law 3 (equivalence) and law 4 (re-layout) for every legal pair of layout options.

The steps of every cell are compared with one plain process: every loss, every gradient norm, every tensor of the first
gradient, the held-out loss, and the last steps repeated from the state that another layout saved. CI runs a
few cells for 6 steps, which have every value of every option, and one cell per engine for 20; `make sweep-tests` runs
those that cover all pairs for 6, and `make sweep-parity` every legal layout for 20.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.plan.proof.equivalence import ProofResult
from tests.parity.choice import gating, gating_curves, is_runnable, legal_pairs, pairs_of, precision_pairs, read_pairs
from tests.parity.matrix import LAYOUT, LONG, NUMBERS, SHORT, is_legal, name_of
from tests.parity.run import failure_text, run

CELLS = {name_of(values): values for values in read_pairs()}


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProofResult]:
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in items if item.function is test_a_cell_follows_the_reference]
    return run([CELLS[name] for name in names], tmp_path_factory.mktemp("parity"), length=SHORT)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_follows_the_reference(results: dict[str, ProofResult], name: str) -> None:
    assert results[name].passed, failure_text(name, results[name])


@pytest.mark.integration
def test_every_value_of_every_option_follows_the_reference_for_a_few_steps(tmp_path: Path) -> None:
    found = run(gating(), tmp_path, length=SHORT)
    assert [failure_text(name, result) for name, result in found.items() if not result.passed] == []


@pytest.mark.integration
def test_a_layout_of_each_engine_follows_the_reference_for_20_steps(tmp_path: Path) -> None:
    found = run(gating_curves(), tmp_path, length=LONG)
    assert len(found) == 2
    assert [failure_text(name, result) for name, result in found.items() if not result.passed] == []


def test_every_legal_pair_of_values_is_covered_by_a_cell() -> None:
    covered = {pair for v in CELLS.values() if v["precision"] == "fp32" for pair in pairs_of(v, [*LAYOUT, *NUMBERS])}
    with_precision = {pair for v in CELLS.values() for pair in pairs_of(v, [*LAYOUT, *NUMBERS, "precision"])}
    assert not legal_pairs() - covered, "run: python -m tests.parity.choice"
    assert not precision_pairs() - with_precision, "run: python -m tests.parity.choice"


def test_every_cell_is_legal() -> None:
    assert [name for name, v in CELLS.items() if not (is_legal(v) and is_runnable(v, v["precision"]))] == []
