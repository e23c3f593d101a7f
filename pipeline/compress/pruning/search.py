"""Finds the shape that meets a target: one ratio for all axes, then the rest of the budget for the axes that lost most.

1. Every axis that may be cut gets the largest allowed size that is at most r times the original. r is the largest ratio
   whose cost stays within the target. It is found by bisection over the finitely many ratios at which a size changes,
   since the cost grows with every size.
2. While a next larger size of one axis still fits, the axis that is smallest beside its original size grows (among
   equals the first in the order of `axes`).
3. Coarse sizes may leave more than 5 % of the target unused. Then all combinations of the sizes nearest to the ratio
   are tried as well (four of each axis), and the one nearest to the target is taken; among equals the most even cut.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log

_UNUSED = 0.05
_NEAREST = 4

Shape = dict[str, int]
Cost = Callable[[Mapping[str, int]], float]


@dataclass(frozen=True)
class Choices:
    """Sizes among which the search chooses.

    Attributes:
        original: axis -> size in the original model.
        allowed: axis that may be cut -> its allowed sizes, ascending; the last is the original's size.
    """

    original: Mapping[str, int]
    allowed: Mapping[str, Sequence[int]]

    @property
    def smallest(self) -> Shape:
        """The shape with every axis at its smallest size."""
        return {**self.original, **{axis: sizes[0] for axis, sizes in self.allowed.items()}}

    def at(self, ratio: float) -> Shape:
        """The shape with every axis at its largest size up to `ratio` times the original's, or its smallest."""
        # a size may be one third of the original, and a third times three is not one in floating point
        limit = ratio * (1 + 1e-12)
        fitting = {
            axis: max((size for size in sizes if size <= limit * self.original[axis]), default=sizes[0])
            for axis, sizes in self.allowed.items()
        }
        return {**self.original, **fitting}

    def spread(self, shape: Mapping[str, int]) -> float:
        """Unevenness of the cut: the largest remaining share of an axis, divided by the smallest."""
        left = [shape[axis] / self.original[axis] for axis in self.allowed]
        return max(left) / min(left)

    def ratios(self) -> list[float]:
        """Ratios at which a size changes, ascending."""
        return sorted({size / self.original[axis] for axis, sizes in self.allowed.items() for size in sizes})


def search(choices: Choices, cost: Cost, limit: float, *, grow: bool = True) -> Shape | None:
    """Finds the shape by the rule above; None if even the smallest sizes cost too much.

    Args:
        choices: allowed sizes.
        cost: function that returns the cost of a shape; it must not fall when a size grows.
        limit: largest allowed cost.
        grow: whether to use the rest of the budget for single axes (steps 2 and 3); without it few shapes are tried.
    """
    if cost(choices.smallest) > limit:
        return None
    ratios = choices.ratios()
    low, high = 0, len(ratios)  # ratios[low] fits, or is the smallest
    while high - low > 1:
        middle = (low + high) // 2
        if cost(choices.at(ratios[middle])) <= limit:
            low = middle
        else:
            high = middle
    shape = choices.at(ratios[low])
    if cost(shape) > limit:
        shape = choices.smallest
    if not grow:
        return shape
    shape = _grown(choices, shape, cost, limit)
    return shape if cost(shape) >= (1 - _UNUSED) * limit else _nearest(choices, shape, ratios[low], cost, limit)


def _nearest(choices: Choices, shape: Shape, ratio: float, cost: Cost, limit: float) -> Shape:
    """The shape of step 3; `shape` if no other is nearer to the target."""
    near = [
        sorted(sizes, key=lambda size, axis=axis: abs(log(size / choices.original[axis] / ratio)))[:_NEAREST]  # type: ignore[misc]
        for axis, sizes in choices.allowed.items()
    ]
    tried = [shape, *({**choices.original, **dict(zip(choices.allowed, each, strict=True))} for each in product(*near))]
    fitting = [(cost(each), -choices.spread(each), each) for each in tried]
    return max((each for each in fitting if each[0] <= limit), key=lambda each: each[:2])[2]


def _grown(choices: Choices, shape: Shape, cost: Cost, limit: float) -> Shape:
    while True:
        larger = {axis: [s for s in sizes if s > shape[axis]][:1] for axis, sizes in choices.allowed.items()}
        fitting = [axis for axis, sizes in larger.items() if sizes and cost({**shape, axis: sizes[0]}) <= limit]
        if not fitting:
            return shape
        chosen = min(fitting, key=lambda axis: shape[axis] / choices.original[axis])
        shape = {**shape, chosen: larger[chosen][0]}
