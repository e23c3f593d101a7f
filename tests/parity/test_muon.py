"""Laws 3 and 4 with Muon: whole matrices are orthogonalized in every layout, and momenta resume from another one's.

Each cell is compared as those of the parity matrix are, and resumes from the state that the cell before it saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.matrix import LONG, SHORT, Values, is_legal
from tests.parity.run import failure_text, run
from tests.parity.test_completep import PLAIN


def cell(sharding: str, **values: Any) -> Values:
    return {**PLAIN, "completep": False, "muon": True, "sharding": sharding, **values}


QUICK = [cell("torch-3", tp=2, dp=2, qk_clip=True), cell("deepspeed-2", dp=2, qk_clip=True)]
"""They differ in kind: boxes of rows and columns, and flat ranges that cut through matrices."""
ALL = [  # a cell with qk_clip says of Muon what the same cell without it would; all others: `make sweep-parity`
    *QUICK,
    cell("torch-3", dp=2, cp="ring-2", qk_clip=True, activation_checkpointing="selective", compile=True),
    cell("torch-3", dp=2, cp="ring-2", qk_clip=True, mask=True),
    cell("deepspeed-1", dp=2, cp="ulysses-2", qk_clip=True, mask=True),
    cell("deepspeed-1", pipeline="1f1b-2", dp=2, accumulation=2, qk_clip=True),
    cell("torch-2", pipeline="interleaved_1f1b-2", accumulation=2, tp=2, qk_clip=True, mask=True),
    cell("torch-3", dp=4, extra="shard", qk_clip=True),
    cell("torch-2", dp=2, precision="fp16", qk_clip=True),
    cell("deepspeed-3", dp=2, tp=2, qk_clip=True),
    cell("torch-3", tp=2, dp=2, completep=True),
    cell("deepspeed-0", dp=2),
    cell("deepspeed-0", pipeline="1f1b-2", tp=2, accumulation=2),
    cell("torch-0", pipeline="interleaved_1f1b-2", accumulation=2, dp=2),
    cell("torch-2", pipeline="zero_bubble-2", accumulation=2, tp=2),
    cell("torch-3", dp=2, cp="ring-2", activation_checkpointing="full"),
    cell("torch-3", dp=2, precision="bf16"),
    cell("deepspeed-2", dp=2, precision="bf16"),
    cell("torch-3", dp=4, experts=True),
    cell("torch-2", dp=2, tp=2, experts=True),
    cell("deepspeed-3", dp=2, experts=True),
    cell("deepspeed-1", dp=4, experts=True),
]


def test_a_cell_of_each_engine_follows_the_reference_for_a_few_steps(tmp_path: Path) -> None:
    found = run(QUICK, tmp_path, length=SHORT)
    assert len(found) == 2
    assert [failure_text(name, result) for name, result in found.items() if not result.passed] == []


@pytest.mark.sweep
def test_layouts_follow_the_reference_for_20_steps(tmp_path: Path) -> None:
    found = run(ALL, tmp_path, length=LONG)
    assert len(found) == len(ALL)
    assert [failure_text(name, result) for name, result in found.items() if not result.passed] == []


def test_cells_are_legal() -> None:
    assert [values for values in ALL if not is_legal(values)] == []
