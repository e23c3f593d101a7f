"""Laws 3 and 4 with what is no factor of the matrix: CompleteP, Muon, and expert parallelism.

Each cell is compared as those of the parity matrix are, and resumes from the state that the cell before it saved: from
another engine, or another size of expert parallelism. The first cells of each kind run for a few steps in CI, all of
them for 20 with `make sweep-tests`, every layout with `make sweep-parity`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.parity.matrix import LONG, NUMBERS, SHORT, RunLength, Values, is_legal
from tests.parity.run import failure_text, run


def cell(sharding: str, **values: Any) -> Values:
    """On one rank and in fp32 but for what is given; clipped, so that norms are compared."""
    plain = {name: choices[0] for name, choices in NUMBERS.items()} | {"precision": "fp32", "clip": 0.5}
    alone = {"pipeline": "none", "tp": 1, "cp": "none", "dp": 1, "extra": "none", "accumulation": 1}
    return {**plain, **alone, "sharding": sharding, **values}


def completep(sharding: str, **values: Any) -> Values:
    return cell(sharding, completep=True, **values)


def muon(sharding: str, **values: Any) -> Values:
    return cell(sharding, muon=True, **values)


def experts(sharding: str, **values: Any) -> Values:
    return cell(sharding, experts=True, **values)


IN_CI = {
    "CompleteP": [completep("torch-2", tp=2, dp=2, tied=True), completep("deepspeed-2", dp=2, tied=True)],
    # they differ in kind: boxes of rows and columns, and flat ranges that cut through matrices
    "Muon": [muon("torch-3", tp=2, dp=2, qk_clip=True), muon("deepspeed-2", dp=2, qk_clip=True)],
    "experts": [experts("torch-2", dp=2, pipeline="dualpipev-2", accumulation=4, ep=2, overlap=True)],
}
ALL = {
    "CompleteP": [
        *IN_CI["CompleteP"],
        completep("deepspeed-3", dp=2, tp=2),
        completep("torch-0", pipeline="interleaved_1f1b-2", accumulation=2, tied=True),
        completep("deepspeed-0", pipeline="1f1b-2", tp=2, accumulation=2, tied=True),
        completep("deepspeed-1", pipeline="1f1b-2", dp=2, accumulation=2),
        completep("torch-3", dp=2, cp="ring-2", activation_checkpointing="full"),
        completep("torch-3", dp=2, precision="bf16"),
        completep("deepspeed-2", dp=2, precision="bf16"),
    ],
    "Muon": [  # a cell with qk_clip says of Muon what the same cell without it would
        *IN_CI["Muon"],
        muon("torch-3", dp=2, cp="ring-2", qk_clip=True, activation_checkpointing="selective", compile=True),
        muon("torch-3", dp=2, cp="ring-2", qk_clip=True, mask=True),
        muon("deepspeed-1", dp=2, cp="ulysses-2", qk_clip=True, mask=True),
        muon("deepspeed-1", pipeline="1f1b-2", dp=2, accumulation=2, qk_clip=True),
        muon("torch-2", pipeline="interleaved_1f1b-2", accumulation=2, tp=2, qk_clip=True, mask=True),
        muon("torch-3", dp=4, extra="shard", qk_clip=True),
        muon("torch-2", dp=2, precision="fp16", qk_clip=True),
        muon("deepspeed-3", dp=2, tp=2, qk_clip=True),
        muon("torch-3", tp=2, dp=2, completep=True),
        muon("deepspeed-0", dp=2),
        muon("deepspeed-0", pipeline="1f1b-2", tp=2, accumulation=2),
        muon("torch-0", pipeline="interleaved_1f1b-2", accumulation=2, dp=2),
        muon("torch-2", pipeline="zero_bubble-2", accumulation=2, tp=2),
        muon("torch-3", dp=2, cp="ring-2", activation_checkpointing="full"),
        muon("torch-3", dp=2, precision="bf16"),
        muon("deepspeed-2", dp=2, precision="bf16"),
        muon("torch-3", dp=4, experts=True),
        muon("torch-2", dp=2, tp=2, experts=True),
        muon("deepspeed-3", dp=2, experts=True),
        muon("deepspeed-1", dp=4, experts=True),
    ],
    "experts": [
        *IN_CI["experts"],
        experts("torch-3", dp=4),
        experts("deepspeed-3", dp=4, ep=2),
        experts("torch-3", dp=4, ep=4),
        experts("torch-0", dp=2, tp=2, ep=4),
        experts("torch-3", dp=4, extra="shard", ep=2),
        experts("torch-3", dp=2, cp="ring-2", ep=4, activation_checkpointing="selective"),
        experts("torch-2", dp=2, pipeline="zero_bubble-2", accumulation=2, ep=2),
        experts("torch-0", dp=2, tp=2, pipeline="interleaved_1f1b-2", accumulation=2, ep=4),
        experts("deepspeed-0", dp=2, tp=2, ep=4),
        experts("deepspeed-1", dp=2, pipeline="1f1b-2", accumulation=2, ep=2),
        experts("torch-3", dp=2, ep=2, muon=True),
        experts("torch-3", dp=2, ep=2, precision="bf16"),
    ],
}


def assert_equivalent(cells: list[Values], work: Path, length: RunLength) -> None:
    found = run(cells, work, length=length)
    assert len(found) == len(cells)
    assert [failure_text(name, result) for name, result in found.items() if not result.passed] == []


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("CompleteP", marks=pytest.mark.integration),
        "Muon",
        pytest.param("experts", marks=pytest.mark.integration),
    ],
)
def test_the_first_cells_follow_the_reference_for_a_few_steps(kind: str, tmp_path: Path) -> None:
    assert_equivalent(IN_CI[kind], tmp_path, SHORT)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ALL)
def test_all_cells_follow_the_reference_for_20_steps(kind: str, tmp_path: Path) -> None:
    assert_equivalent(ALL[kind], tmp_path, LONG)


def test_cells_are_legal_and_neighbours_differ() -> None:
    assert [values for cells in ALL.values() for values in cells if not is_legal(values)] == []
    assert all(before != after for cells in ALL.values() for before, after in pairwise(cells))
