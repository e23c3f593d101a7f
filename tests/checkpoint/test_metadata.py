"""Shards must cover every element of a tensor exactly once; otherwise the tensor is reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.coverage import coverage_error, unevenly_covered
from pipeline.checkpoint.format.metadata import read_metadata
from pipeline.checkpoint.format.shard_table import ShardTable, StoredTensor, padded
from pipeline.checkpoint.format.shards import split_flat_range
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
