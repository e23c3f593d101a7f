"""Shards must cover every element of a tensor exactly once; otherwise the tensor is reported."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.metadata import StoredTensor, coverage_error, read_metadata
from pipeline.checkpoint.shards import Rectangle, split_flat_range


def stored(shape: tuple[int, ...], shards: list[Rectangle]) -> StoredTensor:
    return StoredTensor("weight/w", shape, torch.float32, tuple(shards))


@st.composite
def sharded_tensor(draw: st.DrawFn) -> StoredTensor:
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
    return stored(shape, draw(st.permutations(shards)))


@given(whole=sharded_tensor(), data=st.data())
def test_shards_that_cover_a_tensor_exactly_once_are_accepted_and_no_others(
    whole: StoredTensor, data: st.DataObject
) -> None:
    assert coverage_error(whole) is None
    chosen = data.draw(st.sampled_from(whole.shards))
    gap = dataclasses.replace(whole, shards=tuple(p for p in whole.shards if p != chosen))
    assert f"{chosen.numel:,} of {whole.numel:,} elements are in no shard" in str(coverage_error(gap))
    twice = dataclasses.replace(whole, shards=(*whole.shards, chosen))
    assert "overlap" in str(coverage_error(twice))


def test_a_gap_and_an_overlap_of_the_same_size_do_not_cancel_out() -> None:
    left, again = Rectangle((0, 0), (4, 3)), Rectangle((2, 2), (2, 3))
    assert "overlap" in str(
        coverage_error(stored((4, 6), [left, again, Rectangle((0, 4), (2, 2)), Rectangle((0, 3), (2, 1))]))
    )


def test_a_shard_outside_of_its_tensor_is_reported() -> None:
    assert "does not lie within (4, 6)" in str(coverage_error(stored((4, 6), [Rectangle((0, 0), (5, 6))])))


def test_invalid_metadata_is_a_checkpoint_error(tmp_path: Path) -> None:
    for content in (b"", b"nonsense", b"\x80\x04N."):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match="has no readable metadata"):
            read_metadata(tmp_path)
