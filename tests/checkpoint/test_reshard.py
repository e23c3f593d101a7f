"""Law 4: a checkpoint of one layout resumes on any other with the same losses (reshard on load): both engines.

A chain: each layout trains 20 steps, then loads the checkpoint that the layout before it saved after step 15, and
repeats the last 5. In `tests/parity/` every cell does the same after an arbitrary other one; here each kind of layout
loads a checkpoint of the other engine, and its own is loaded by the other engine. CI runs one pair of
layouts, `make sweep-tests` the others.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import CheckpointError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.checkpoint.format.shards import NamedShard, split_flat_range
from pipeline.checkpoint.memory.shard_files import ReadBytes, ShardFiles
from pipeline.plan.proof.compare import RESUMED
from pipeline.plan.proof.equivalence import ProofResult
from tests.conftest import selected
from tests.engines.comparison import layout_params
from tests.parity.matrix import LAYOUT, NUMBERS, SHORT, Values, is_legal, name_of
from tests.parity.run import failure_text, run

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


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


@given(shape=SHAPES, data=st.data())
@settings(deadline=None)
def test_the_rectangles_of_a_flat_range_are_that_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    length = data.draw(st.integers(0, numel - start))
    whole = torch.arange(numel).reshape(shape)
    rectangles = split_flat_range(shape, start, length)
    parts = [
        whole[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True))].flatten() for b in rectangles
    ]
    found = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    assert found.tolist() == list(range(start, start + length))
    assert len(rectangles) <= max(1, 2 * len(shape) - 1)


def test_a_flat_range_of_a_matrix_is_at_most_three_rectangles() -> None:
    rectangles = split_flat_range((5, 7), 3, 25)
    assert [(b.offsets, b.sizes) for b in rectangles] == [((0, 3), (1, 4)), ((1, 0), (3, 7))]
    assert len(split_flat_range((5, 7), 3, 26)) == 3


def write_flat(tensor: torch.Tensor, directory: Path) -> None:
    shard = NamedShard(tuple(tensor.shape), start=0, values=tensor.flatten())
    named_state.write({named_state.weight_key("w"): shard, "optimizer_step": torch.tensor(3.0)}, directory)


@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_any_flat_range_of_a_full_tensor_is_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tensor = torch.randn(6, 5)
    directory = tmp_path_factory.mktemp("ck")
    write_flat(tensor, directory)
    start = data.draw(st.integers(0, 30))
    length = data.draw(st.integers(0, 30 - start))
    values = torch.zeros(length)
    named_state.read({named_state.weight_key("w"): NamedShard((6, 5), start=start, values=values)}, directory)
    assert torch.equal(values, tensor.flatten()[start : start + length])


@pytest.mark.parametrize(("start", "length", "read"), [(300 * 128 + 5, 2 * 128, 3), (0, 600 * 128, 1024), (0, 1, 1)])
def test_of_a_large_shard_only_the_rows_that_are_needed_are_read(
    tmp_path: Path, start: int, length: int, read: int
) -> None:
    tensor, values, reads = torch.randn(1024, 128), torch.zeros(length), ReadBytes()
    write_flat(tensor, tmp_path)
    wanted = {named_state.weight_key("w"): NamedShard((1024, 128), start=start, values=values)}
    named_state.read(wanted, tmp_path, files=ShardFiles(tmp_path, reads=reads))
    assert torch.equal(values, tensor.flatten()[start : start + length])
    whole = read == 1024  # then the bytes that `torch.save` writes around it, too
    assert read * 512 <= reads.run_dir <= read * 512 + (4096 if whole else 0)


def test_another_shape_and_a_missing_tensor_are_refused(tmp_path: Path) -> None:
    write_flat(torch.randn(6, 5), tmp_path)
    for name, shape in (("w", (5, 6)), ("other", (6, 5))):
        shard = NamedShard(shape, start=0, values=torch.zeros(30))
        with pytest.raises(CheckpointError, match="cannot be read into this model"):
            named_state.read({named_state.weight_key(name): shard}, tmp_path)


def test_shapes_are_read_from_the_metadata_alone(tmp_path: Path) -> None:
    write_flat(torch.randn(6, 5), tmp_path)
    assert CheckpointWeights(tmp_path).shapes == {"w": torch.Size([6, 5])}
    next(tmp_path.glob("*.distcp")).unlink()
    assert CheckpointWeights(tmp_path).shapes == {"w": torch.Size([6, 5])}
