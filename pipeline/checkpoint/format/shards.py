"""Named checkpoint shards, independent of the layout: parameter name, full shape, and the offsets of the values.

`torch.distributed.checkpoint` writes a rank's part of a parameter this way in any layout, and reads it back in any
other layout (reshard on load).

With tensor parallelism a rank has a rectangle (box) of a parameter; with ZeRO it has a flat range of a parameter or
box. A flat range of a matrix is at most three rectangles: the end of a row, full rows, the beginning of a row. With
more dims the same applies recursively within the first and last row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pipeline.models.construction.rectangle import Rectangle


def split_flat_range(shape: tuple[int, ...], start: int, length: int) -> list[Rectangle]:
    """Splits the flat range [start, start + length) of a row-major tensor into rectangles, in flat order.

    Args:
        shape: shape of the full tensor; () for a scalar.
        start: first flat index.
        length: number of elements.
    """
    assert 0 <= start <= start + length <= math.prod(shape)
    if length == 0:
        return []
    if len(shape) <= 1:
        return [Rectangle((start,) * len(shape), (length,) * len(shape))]
    row = math.prod(shape[1:])
    first_row, skipped = divmod(start, row)
    rectangles: list[Rectangle] = []
    if skipped:
        head = min(row - skipped, length)
        rectangles += [_in_row(first_row, each) for each in split_flat_range(shape[1:], skipped, head)]
        first_row, length = first_row + 1, length - head
    full_rows, tail = divmod(length, row)
    if full_rows:
        rectangles.append(Rectangle((first_row, *(0,) * (len(shape) - 1)), (full_rows, *shape[1:])))
    if tail:
        rectangles += [_in_row(first_row + full_rows, each) for each in split_flat_range(shape[1:], 0, tail)]
    return rectangles


def _in_row(row: int, rectangle: Rectangle) -> Rectangle:
    return Rectangle((row, *rectangle.offsets), (1, *rectangle.sizes))


class NamedShard:
    """This rank's shard of one named tensor, with the sharding protocol of `torch.distributed.checkpoint`.

    Args:
        shape: shape of the full tensor.
        start: first flat index of this rank's part.
        values: 1-D, this rank's values in flat order; a load writes them in place. May be empty.
        box: rectangle of the full tensor within which `start` counts (tensor parallelism); None for the whole tensor.

    Attributes:
        parts: offsets of each rectangle of the shard -> its values, a view in its shape.
    """

    def __init__(self, shape: tuple[int, ...], *, start: int, values: Tensor, box: Rectangle | None = None) -> None:
        self.shape, self.dtype = torch.Size(shape), values.dtype
        rectangles = split_flat_range(box.sizes if box else tuple(shape), start, values.numel())
        if box is not None:
            rectangles = [each.shifted(box.offsets) for each in rectangles]
        parts = values.split([each.numel for each in rectangles]) if rectangles else ()
        self.parts = {each.offsets: part.view(each.sizes) for each, part in zip(rectangles, parts, strict=True)}

    @classmethod
    def like(cls, other: NamedShard, values: Tensor) -> NamedShard:
        """Makes a shard that covers the same part of a tensor as another shard, with new values.

        Args:
            other: the other shard.
            values: 1-D, new values in the order of its parts.
        """
        made = cls.__new__(cls)
        made.shape, made.dtype = other.shape, values.dtype
        parts = values.split([part.numel() for part in other.parts.values()]) if other.parts else ()
        made.parts = {at: new.view(part.shape) for (at, part), new in zip(other.parts.items(), parts, strict=True)}
        return made

    def size(self) -> torch.Size:
        """Returns the full shape; `torch.distributed.checkpoint` compares it with the stored one."""
        return self.shape

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.shape,
                ),
            )
            for offsets, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.size()) for offsets, part in self.parts.items()]

    def zero_(self) -> None:
        """Sets this rank's values to zero."""
        for part in self.parts.values():
            part.zero_()
