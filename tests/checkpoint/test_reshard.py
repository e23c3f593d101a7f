"""Law 4: a checkpoint of one layout resumes on any other with the same losses (reshard on load): both engines.

A chain: each layout trains 20 steps, then loads the checkpoint that the layout before it saved after step 15, and
repeats the last 5. In `tests/parity/` every cell does the same after an arbitrary other one; here each kind of layout
loads a checkpoint of the other engine, and its own is loaded by the other engine. `make test` runs one pair of layouts,
`make test-integration` the others.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pipeline.plan.proof.compare import RESUMED
from pipeline.plan.proof.equivalence import ProofResult
from tests.conftest import selected
from tests.engines.comparison import layout_params
from tests.parity.matrix import LAYOUT, NUMBERS, SHORT, Values, is_legal, name_of
from tests.parity.run import failure_text, run


def cell(sharding: str, **values: Any) -> Values:
    """A cell of the parity matrix with default values but for its layout. fp32; clipped, so that norms are compared."""
    defaults = {name: choices[0] for name, choices in {**LAYOUT, **NUMBERS}.items()}
    return {**defaults, "clip": 0.5, "precision": "fp32", "sharding": sharding, **values}


CHAIN = {
    "DeepSpeed Z1, dp 2": cell("deepspeed-1", dp=2),
    "DDP, dp 4": cell("torch-0", dp=4),
    "DeepSpeed Z3, dp 4": cell("deepspeed-3", dp=4),
    "FSDP2, dp 2": cell("torch-3", dp=2),
    "DeepSpeed PP": cell("deepspeed-1", pipeline="1f1b-2", accumulation=2),
}
"""In this order; others: `tests/parity`."""

ALWAYS = "DDP, dp 4"
"""Loads the sharded optimizer state of two ranks: cheap, and of both engines."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProofResult]:
    """The selected layouts of the chain, and those whose checkpoints they load, in one launch."""
    wanted = set(selected(request.session, test_a_layout_resumes_from_a_checkpoint_of_the_one_before, "layout"))
    wanted |= {before for before, after in pairwise(CHAIN) if after in wanted}
    cells = [values for layout, values in CHAIN.items() if layout in wanted]
    return run(cells, tmp_path_factory.mktemp("reshard"), length=SHORT)


@pytest.mark.integration
@pytest.mark.parametrize("layout", layout_params({ALWAYS}, CHAIN, integration=CHAIN))
def test_a_layout_resumes_from_a_checkpoint_of_the_one_before(results: dict[str, ProofResult], layout: str) -> None:
    result = results[name_of(CHAIN[layout])]
    assert result.passed, failure_text(layout, result)
    assert RESUMED in {each.quantity for each in result.comparisons}


def test_every_step_of_the_chain_changes_the_engine() -> None:
    assert [name for name, values in CHAIN.items() if not is_legal(values)] == []
    engines = [values["sharding"].partition("-")[0] for values in CHAIN.values()]
    assert all(a != b for a, b in pairwise(engines))
    assert {values["dp"] for values in CHAIN.values()} == {1, 2, 4}
