"""Every element of a tensor lies in exactly one piece, or the tensor is named."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.metadata import StoredTensor, misfit, read_metadata
from pipeline.checkpoint.shards import Rectangle, rectangles


def stored(shape: tuple[int, ...], pieces: list[Rectangle]) -> StoredTensor:
    return StoredTensor("weight/w", shape, torch.float32, tuple(pieces))


@st.composite
def cut_up(draw: st.DrawFn) -> StoredTensor:
    """A tensor that tensor parallelism cut along one dim, and ZeRO cut the parts in flat ranges."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [Rectangle((0,) * len(shape), shape)]
    if shape:
        dim, at = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, 6))
        at = min(at, shape[dim])
        sizes = [tuple(n if d == dim else s for d, s in enumerate(shape)) for n in (at, shape[dim] - at)]
        offsets = [tuple(o if d == dim else 0 for d in range(len(shape))) for o in (0, at)]
        boxes = [Rectangle(o, s) for o, s in zip(offsets, sizes, strict=True) if math.prod(s)]
    pieces: list[Rectangle] = []
    for box in boxes:
        border = draw(st.integers(0, box.numel))
        for start, length in ((0, border), (border, box.numel - border)):
            pieces += [each.moved(box.offsets) for each in rectangles(box.sizes, start, length)]
    return stored(shape, draw(st.permutations(pieces)))


@given(whole=cut_up(), data=st.data())
def test_what_covers_a_tensor_once_is_whole_and_nothing_else_is(whole: StoredTensor, data: st.DataObject) -> None:
    assert misfit(whole) is None
    chosen = data.draw(st.sampled_from(whole.pieces))
    gap = dataclasses.replace(whole, pieces=tuple(p for p in whole.pieces if p != chosen))
    assert f"{chosen.numel:,} of {whole.numel:,} elements are in no piece" in str(misfit(gap))
    twice = dataclasses.replace(whole, pieces=(*whole.pieces, chosen))
    assert "overlap" in str(misfit(twice))


def test_a_gap_and_an_overlap_of_the_same_size_do_not_cancel_out() -> None:
    left, again = Rectangle((0, 0), (4, 3)), Rectangle((2, 2), (2, 3))
    assert "overlap" in str(misfit(stored((4, 6), [left, again, Rectangle((0, 4), (2, 2)), Rectangle((0, 3), (2, 1))])))


def test_a_piece_outside_of_its_tensor_is_named() -> None:
    assert "does not lie within (4, 6)" in str(misfit(stored((4, 6), [Rectangle((0, 0), (5, 6))])))


def test_metadata_that_is_none_is_an_error_for_the_user(tmp_path: Path) -> None:
    for content in (b"", b"nonsense", b"\x80\x04N."):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match="has no readable metadata"):
            read_metadata(tmp_path)
