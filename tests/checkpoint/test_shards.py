"""Named shards: any flat range of a tensor splits into a few rectangles, and any layout reads any other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import CheckpointError
from pipeline.checkpoint import named_state
from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.checkpoint.format.shards import NamedShard, split_flat_range
from pipeline.checkpoint.memory.shard_files import ReadBytes, ShardFiles

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


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
