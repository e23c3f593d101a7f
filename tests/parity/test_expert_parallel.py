"""Laws 3 and 4 with expert parallelism: layouts follow one process, and resume from a layout with another ep, or none.

Each cell is compared as those of the parity matrix are, and resumes from the state that the cell before it saved.
Families, edges and refusals: tests/engines/test_expert_parallel.py and tests/engines/parallel/test_experts.py.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.parity.matrix import LONG, SHORT, Values, is_legal
from tests.parity.run import failure_text, run
from tests.parity.test_completep import PLAIN


def cell(sharding: str, **values: Any) -> Values:
    return {**PLAIN, "completep": False, "experts": True, "sharding": sharding, **values}


QUICK = [
    cell("torch-3", dp=4, ep=4),
    cell("torch-3", dp=4),
    cell("torch-2", dp=2, pipeline="dualpipev-2", accumulation=4, ep=2, overlap=True),
    cell("deepspeed-3", dp=4, ep=2),
]
CELLS = [  # all others: `make sweep-parity`
    *QUICK,
    cell("torch-0", dp=2, tp=2, ep=4),
    cell("torch-3", dp=4, extra="shard", ep=2),
    cell("torch-3", dp=2, cp="ring-2", ep=4, activation_checkpointing="selective"),
    cell("torch-2", dp=2, pipeline="zero_bubble-2", accumulation=2, ep=2),
    cell("torch-0", dp=2, tp=2, pipeline="interleaved_1f1b-2", accumulation=2, ep=4),
    cell("deepspeed-0", dp=2, tp=2, ep=4),
    cell("deepspeed-1", dp=2, pipeline="1f1b-2", accumulation=2, ep=2),
    cell("torch-3", dp=2, ep=2, muon=True),
    cell("torch-3", dp=2, ep=2, precision="bf16"),
]


@pytest.mark.integration
def test_cells_of_both_engines_follow_the_reference_for_a_few_steps(tmp_path: Path) -> None:
    found = run(QUICK, tmp_path, length=SHORT)
    assert len(found) == len(QUICK)
    assert [failure_text(name, result) for name, result in found.items() if not result.passed] == []


@pytest.mark.sweep
def test_layouts_follow_the_reference_for_20_steps(tmp_path: Path) -> None:
    found = run(CELLS, tmp_path, length=LONG)
    assert len(found) == len(CELLS)
    assert [failure_text(name, result) for name, result in found.items() if not result.passed] == []


def test_cells_are_legal_and_neighbours_have_another_ep_or_layout() -> None:
    assert [values for values in CELLS if not is_legal(values)] == []
    assert all(before != after for before, after in pairwise(CELLS))
