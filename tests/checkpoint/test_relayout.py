"""Law 4: what one layout saved, another goes on from, as if nothing had happened: every kind of layout, both engines.

A chain: each layout trains 20 steps, then takes the state that the one before it saved after step 15, and does the last
5 once more. In `tests/parity/` every cell does the same after another one, whichever that is; here each kind of layout
is entered from the other engine's, and left for it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pipeline.proof.compare import RESUMED
from pipeline.proof.equivalence import ProofResult
from tests.parity.matrix import LAYOUT, NUMBERS, Values, is_legal, name_of
from tests.parity.run import failure_text, run


def cell(sharding: str, **values: Any) -> Values:
    """A cell of the parity matrix that is plain but for its layout. fp32; clipped, and norms are compared, too."""
    plain = {name: choices[0] for name, choices in {**LAYOUT, **NUMBERS}.items()}
    return {**plain, "clip": 0.5, "precision": "fp32", "sharding": sharding, **values}


CHAIN = {
    "DeepSpeed Z1, dp 2": cell("deepspeed-1", dp=2),
    "DDP, dp 4": cell("torch-0", dp=4),
    "DeepSpeed Z3, dp 4": cell("deepspeed-3", dp=4),
    "FSDP2, dp 2": cell("torch-3", dp=2),
    "DeepSpeed PP": cell("deepspeed-1", pipeline="1f1b-2", accumulation=2),
    "TP x dp 2": cell("torch-0", tp=2, dp=2),
    "DeepSpeed TP": cell("deepspeed-3", tp=2),
    "3D: FSDP2 x TP x PP": cell("torch-3", dp=2, tp=2, pipeline="1f1b-2", accumulation=2),
    "DeepSpeed Z2, dp 1": cell("deepspeed-2"),
    "PP": cell("torch-0", pipeline="1f1b-2", accumulation=2),
    "DeepSpeed Z1, dp 2, accumulated": cell("deepspeed-1", dp=2, accumulation=2),
}
"""In its order; it ends with the kind of layout that it began with."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProofResult]:
    """All of the chain, in one launch."""
    return run(list(CHAIN.values()), tmp_path_factory.mktemp("relayout"))


@pytest.mark.parametrize("layout", CHAIN)
def test_a_layout_goes_on_from_what_the_one_before_it_saved(verdicts: dict[str, ProofResult], layout: str) -> None:
    verdict = verdicts[name_of(CHAIN[layout])]
    assert verdict.passed, failure_text(layout, verdict)
    assert RESUMED in {each.quantity for each in verdict.comparisons}


def test_every_kind_of_layout_is_left_for_the_other_engine_and_entered_from_it() -> None:
    assert [name for name, values in CHAIN.items() if not is_legal(values)] == []
    engines = [values["sharding"].partition("-")[0] for values in CHAIN.values()]
    assert all(a != b for a, b in pairwise(engines))
    first, *_, last = CHAIN.values()
    assert {**first, "accumulation": None} == {**last, "accumulation": None}
    assert {values["dp"] for values in CHAIN.values()} == {1, 2, 4}
