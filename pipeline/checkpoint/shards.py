"""The named shard: state without layout.

A shard says: of the tensor called `name`, whose full shape is `shape`, these are the values at these offsets. Whoever
holds whatever part of a parameter, in whatever layout, can be written and read this way by
`torch.distributed.checkpoint`, and read back in any other layout.

Tensor parallelism keeps a box of a parameter, ZeRO a flat range of it or of such a box. A flat range of a matrix is
at most three rectangles: the end of a row, whole rows, the beginning of a row; in more dims the same holds again
within the first and last row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Rectangle:
    """A box of a tensor: first index and length along every dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)

    def moved(self, by: tuple[int, ...]) -> Rectangle:
        """The same box, further along every dim."""
        return Rectangle(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)


def rectangles(shape: tuple[int, ...], start: int, length: int) -> list[Rectangle]:
    """Cuts the flat range [start, start + length) of a row-major tensor into boxes, in flat order.

    Args:
        shape: of the full tensor; () is a scalar.
        start: first flat index.
        length: number of elements.
    """
    assert 0 <= start <= start + length <= math.prod(shape)
    if length == 0:
        return []
    if len(shape) <= 1:
        return [Rectangle((start,) * len(shape), (length,) * len(shape))]
    row = math.prod(shape[1:])
    first, skipped = divmod(start, row)
    boxes: list[Rectangle] = []
    if skipped:
        taken = min(row - skipped, length)
        boxes += [_within(first, box) for box in rectangles(shape[1:], skipped, taken)]
        first, length = first + 1, length - taken
    whole, rest = divmod(length, row)
    if whole:
        boxes.append(Rectangle((first, *(0,) * (len(shape) - 1)), (whole, *shape[1:])))
    if rest:
        boxes += [_within(first + whole, box) for box in rectangles(shape[1:], 0, rest)]
    return boxes


def _within(row: int, box: Rectangle) -> Rectangle:
    return Rectangle((row, *box.offsets), (1, *box.sizes))


class NamedShard:
    """This rank's part of one named tensor, in the protocol of `torch.distributed.checkpoint`.

    Args:
        shape: of the full tensor.
        start: first flat index of this rank's part.
        values: 1-D, this rank's values in flat order; on load they are written in place. May be empty.
        box: the part of the full tensor that `start` counts in, when tensor parallelism cut it; all of it when None.
    """

    def __init__(self, shape: tuple[int, ...], *, start: int, values: Tensor, box: Rectangle | None = None) -> None:
        self.shape, self._dtype = torch.Size(shape), values.dtype
        boxes = rectangles(box.sizes if box else tuple(shape), start, values.numel())
        if box is not None:
            boxes = [each.moved(box.offsets) for each in boxes]
        parts = values.split([box.numel for box in boxes]) if boxes else ()
        self._parts = {box.offsets: part.view(box.sizes) for box, part in zip(boxes, parts, strict=True)}

    @property
    def boxes(self) -> tuple[torch.Size, torch.dtype, tuple[Rectangle, ...]]:
        """Full shape, type and boxes: what of the tensor is here, without its values."""
        parts = [Rectangle(offsets, tuple(part.shape)) for offsets, part in self._parts.items()]
        return self.shape, self._dtype, tuple(parts)

    def size(self) -> torch.Size:
        """Full shape; `torch.distributed.checkpoint` compares it with what is stored."""
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
            for offsets, part in self._parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.size()) for offsets, part in self._parts.items()]

    def part(self, index: MetadataIndex) -> Tensor:
        """The values of the box at `index.offset`, a view in the box's shape."""
        assert index.offset is not None
        part: Tensor = self._parts[tuple(index.offset)]
        return part


class SavePlanner(DefaultSavePlanner):
    """Torch's planner, that also knows where a named shard keeps its boxes."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor to write for an item of the plan."""
        held = self.state_dict[index.fqn]
        return held.part(index) if isinstance(held, NamedShard) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Torch's planner, that also knows where a named shard keeps its boxes."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the state as it is: torch's own set-up replaces values that are no tensors by None."""
        assert metadata is not None
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor to fill for an item of the plan."""
        held = self.state_dict[index.fqn]
        return held.part(index) if isinstance(held, NamedShard) else super().lookup_tensor(index)
