"""Sizes, offsets and positions of shards beyond 2^31 and near 2^63 in a checkpoint's tables and metadata."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from pipeline.checkpoint.format.coverage import coverage_errors
from pipeline.checkpoint.format.metadata import decode_metadata, encode_metadata, storage_errors
from pipeline.checkpoint.format.shard_table import (
    CheckpointMetadata,
    ShardTable,
    StoredTensor,
    decode_rows,
    decode_tensors,
    encode_table,
)
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.models.construction.rectangle import Rectangle


def table(*cuts: int, columns: int = 4) -> ShardTable:
    """A tensor of two dims, in shards between rows."""
    offsets = np.array([[first, 0] for first in cuts[:-1]], dtype=np.int64)
    sizes = np.array([[end - first, columns] for first, end in pairwise(cuts)], dtype=np.int64)
    tensor = StoredTensor("weight/w", (cuts[-1], columns), torch.float32)
    return ShardTable((tensor,), np.zeros(len(sizes), np.int64), offsets, sizes)


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**33, 2**57])
def test_a_table_of_large_shards_is_sent_and_read_as_it_is(rows: int) -> None:
    shards = table(0, 3, rows, rows + 5)
    encoded = encode_table(shards)
    found = decode_rows(decode_tensors(encoded.tensors), encoded.rows)
    assert found.tensors == shards.tensors
    assert found.row_bytes.tolist() == [48, 16 * (rows - 3), 80]
    assert not list(coverage_errors(found))
    assert list(coverage_errors(table(0, 3, rows))) == []


def test_a_gap_of_one_row_behind_2_33_is_found() -> None:
    whole = table(0, 2**33, 2**33 + 9)
    later = np.array([[0, 0], [1, 0]])
    gap = ShardTable(whole.tensors, whole.tensor_of_row, whole.offsets + later, whole.sizes - later)
    assert list(coverage_errors(gap))


@pytest.mark.parametrize("large", [2**31, 2**32 + 1, 2**53 + 1, 2**62 + 1])
def test_positions_in_files_are_kept_exactly(large: int) -> None:
    """The second shard is far behind in its file, the third at the beginning of the next: differences of both signs."""
    shards = table(0, 1, 2, 3)
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
