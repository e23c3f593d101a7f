"""A rectangle (box) of a tensor, which names a part of a parameter in any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rectangle:
    """A rectangle (box) of a tensor: first index and length along every dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def full(shape: Sequence[int]) -> Rectangle:
        """Returns the rectangle of a whole tensor."""
        return Rectangle((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in the rectangle."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the rectangle in the tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def shifted(self, by: tuple[int, ...]) -> Rectangle:
        """Returns the same rectangle, `by` further along every dim."""
        return Rectangle(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)

    def rows(self, first: int, count: int) -> Rectangle:
        """Returns the part of `count` rows (indices of the first dim), from row `first` of the rectangle on."""
        return Rectangle((self.offsets[0] + first, *self.offsets[1:]), (count, *self.sizes[1:]))


def part(full: Tensor, box: Rectangle | None) -> Tensor:
    """Copies the values of a box, so that the full tensor can be freed; a box of None is the whole tensor."""
    return full if box is None or box.sizes == tuple(full.shape) else full[box.slices].clone()
