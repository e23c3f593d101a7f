"""Shards must cover every element of a tensor exactly once, or it is reported; beyond 2^31 and near 2^63 too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.coverage import coverage_error, coverage_errors, unevenly_covered
from pipeline.checkpoint.format.metadata import decode_metadata, encode_metadata, read_metadata, storage_errors
from pipeline.checkpoint.format.shard_table import (
    CheckpointMetadata,
    ShardTable,
    StoredTensor,
    decode_rows,
    decode_tensors,
    encode_table,
    padded,
)
from pipeline.checkpoint.format.shards import NamedShard, split_flat_range
from pipeline.models.construction.rectangle import Rectangle


def table(shape: tuple[int, ...], shards: Sequence[Rectangle]) -> ShardTable:
    offsets, sizes = (
        padded([getattr(each, name) for each in shards], dims=max(1, len(shape)), fill=fill)
        for name, fill in (("offsets", 0), ("sizes", 1))
    )
    stored = StoredTensor("weight/w", shape, torch.float32)
    return ShardTable((stored,), np.zeros(len(shards), dtype=np.int64), offsets, sizes)


def error_of(shape: tuple[int, ...], shards: Sequence[Rectangle]) -> str | None:
    """What is wrong, by the exact check; the one by fingerprints must agree."""
    found = coverage_error(StoredTensor("weight/w", shape, torch.float32), shards)
    assert unevenly_covered(table(shape, shards)) == ([0] if found else [])
    return found


@st.composite
def sharded_tensor(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Rectangle]]:
    """A tensor sharded along one dim by tensor parallelism, and the parts in flat ranges by ZeRO."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [Rectangle((0,) * len(shape), shape)]
    if shape:
        dim, at = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, 6))
        at = min(at, shape[dim])
        sizes = [tuple(n if d == dim else s for d, s in enumerate(shape)) for n in (at, shape[dim] - at)]
        offsets = [tuple(o if d == dim else 0 for d in range(len(shape))) for o in (0, at)]
        boxes = [Rectangle(o, s) for o, s in zip(offsets, sizes, strict=True) if math.prod(s)]
    shards: list[Rectangle] = []
    for box in boxes:
        border = draw(st.integers(0, box.numel))
        for start, length in ((0, border), (border, box.numel - border)):
            shards += [each.shifted(box.offsets) for each in split_flat_range(box.sizes, start, length)]
    return shape, draw(st.permutations(shards))


@given(whole=sharded_tensor(), data=st.data())
def test_only_a_partition_is_accepted(whole: tuple[tuple[int, ...], list[Rectangle]], data: st.DataObject) -> None:
    shape, shards = whole
    assert error_of(shape, shards) is None
    chosen = data.draw(st.sampled_from(shards))
    gap = [shard for shard in shards if shard != chosen]
    assert f"{chosen.numel:,} of {math.prod(shape):,} elements are in no shard" in str(error_of(shape, gap))
    assert "overlap" in str(error_of(shape, [*shards, chosen]))


def test_a_gap_and_an_overlap_of_the_same_size_do_not_cancel_out() -> None:
    left, again = Rectangle((0, 0), (4, 3)), Rectangle((2, 2), (2, 3))
    assert "overlap" in str(error_of((4, 6), [left, again, Rectangle((0, 4), (2, 2)), Rectangle((0, 3), (2, 1))]))


def test_a_shard_outside_of_its_tensor_is_reported() -> None:
    assert "does not lie within (4, 6)" in str(error_of((4, 6), [Rectangle((0, 0), (5, 6))]))


def test_invalid_metadata_is_a_checkpoint_error(tmp_path: Path) -> None:
    for name in (".metadata", "metadata.npz"):  # that of earlier versions, and ours
        for content in (b"", b"nonsense", b"\x80\x04N."):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(CheckpointError, match="has no readable metadata"):
                read_metadata(tmp_path)


def test_metadata_of_earlier_versions_executes_nothing(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nmkdir\n(S'" + str(tmp_path / "made").encode() + b"'\ntR.")
    with pytest.raises(CheckpointError, match=r"has no readable metadata: it names os.mkdir, which opening it would"):
        read_metadata(tmp_path)
    assert not (tmp_path / "made").exists()


def table_of_rows(*cuts: int) -> ShardTable:
    """A tensor of four columns, in shards between rows."""
    return table((cuts[-1], 4), [Rectangle((first, 0), (end - first, 4)) for first, end in pairwise(cuts)])


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**33, 2**57])
def test_a_table_of_large_shards_is_sent_and_read_as_it_is(rows: int) -> None:
    shards = table_of_rows(0, 3, rows, rows + 5)
    encoded = encode_table(shards)
    found = decode_rows(decode_tensors(encoded.tensors), encoded.rows)
    assert found.tensors == shards.tensors
    assert found.row_bytes.tolist() == [48, 16 * (rows - 3), 80]
    assert not list(coverage_errors(found))
    assert list(coverage_errors(table_of_rows(0, 3, rows))) == []


def test_a_gap_of_one_row_behind_2_33_is_found() -> None:
    whole = table_of_rows(0, 2**33, 2**33 + 9)
    later = np.array([[0, 0], [1, 0]])
    gap = ShardTable(whole.tensors, whole.tensor_of_row, whole.offsets + later, whole.sizes - later)
    assert list(coverage_errors(gap))


@pytest.mark.parametrize("large", [2**31, 2**32 + 1, 2**53 + 1, 2**62 + 1])
def test_positions_in_files_are_kept_exactly(large: int) -> None:
    """The second shard is far behind in its file, the third at the beginning of the next: differences of both signs."""
    shards = table_of_rows(0, 1, 2, 3)
    position = np.array([7, large, 3], dtype=np.int64)
    written = CheckpointMetadata(shards, ("a", "b"), np.array([0, 0, 1]), position, np.array([16, 16, 16]))
    found = decode_metadata(encode_metadata(written))
    assert found.position.tolist() == position.tolist()
    assert found.length.tolist() == [16, 16, 16]
    assert not list(storage_errors(found, {"a": large + 16, "b": 19}))
    assert len(list(storage_errors(found, {"a": large + 15, "b": 19}))) == 1


def test_a_flat_range_behind_2_31_elements_has_its_place() -> None:
    rows, columns = 2**20, 2**13  # 2^33 elements
    values = torch.empty(2 * columns, device="meta")
    shard = NamedShard(
        (rows, columns), start=(rows - 2) * columns, values=values, box=Rectangle((0, 0), (rows, columns))
    )
    assert list(shard.parts) == [(rows - 2, 0)]
