"""Laws 3 and 4 with CompleteP: layouts of both engines follow one process, whose parameters have rates of their own.

Each cell is compared as those of the parity matrix are, and resumes from the state that the cell before it saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.matrix import LONG, NUMBERS, SHORT, Values, is_legal
from tests.parity.run import failure_text, run

PLAIN: dict[str, Any] = {
    **{name: choices[0] for name, choices in NUMBERS.items()},
    "precision": "fp32",
    "pipeline": "none",
    "tp": 1,
    "cp": "none",
    "dp": 1,
    "extra": "none",
    "accumulation": 1,
    "clip": 0.5,
    "completep": True,
}


def cell(sharding: str, **values: Any) -> Values:
    return {**PLAIN, "sharding": sharding, **values}


QUICK = [cell("torch-2", tp=2, dp=2, tied=True), cell("deepspeed-2", dp=2, tied=True)]
ALL = [
    *QUICK,
    cell("deepspeed-3", dp=2, tp=2),
    cell("torch-0", pipeline="interleaved_1f1b-2", accumulation=2, tied=True),
    cell("deepspeed-0", pipeline="1f1b-2", tp=2, accumulation=2, tied=True),
    cell("deepspeed-1", pipeline="1f1b-2", dp=2, accumulation=2),
    cell("torch-3", dp=2, cp="ring-2", activation_checkpointing="full"),
    cell("torch-3", dp=2, precision="bf16"),
    cell("deepspeed-2", dp=2, precision="bf16"),
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
