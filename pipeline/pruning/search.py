"""The shape that meets a target: one ratio for all axes, then the rest of the budget to the axes that lost most.

1. Every axis that may be cut goes to the largest allowed size that is at most r times its own. r is the largest for
   which the cost stays within the target; it is found by bisection over the finitely many ratios at which a size
   changes, since the cost grows with every size.
2. While a next larger size of one axis still fits, the axis that is smallest beside its original size grows (the first
   of them in the order of `axes`).

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Shape = dict[str, int]
Cost = Callable[[Mapping[str, int]], float]


@dataclass(frozen=True)
class Choices:
    """Sizes that the search may give.

    Attributes:
        original: axis -> size.
        allowed: axis that may be cut -> its allowed sizes, ascending; the last is the original's.
    """

    original: Mapping[str, int]
    allowed: Mapping[str, Sequence[int]]

    @property
    def smallest(self) -> Shape:
        """Every axis at its smallest."""
        return {**self.original, **{axis: sizes[0] for axis, sizes in self.allowed.items()}}

    def at(self, ratio: float) -> Shape:
        """Every axis at the largest size of at most `ratio` times its own, or at its smallest."""
        # a size may be one third of the original, and a third times three is not one in floating point
        limit = ratio * (1 + 1e-12)
        fitting = {
            axis: max((size for size in sizes if size <= limit * self.original[axis]), default=sizes[0])
            for axis, sizes in self.allowed.items()
        }
        return {**self.original, **fitting}

    def ratios(self) -> list[float]:
        """The ratios at which a size changes, ascending."""
        return sorted({size / self.original[axis] for axis, sizes in self.allowed.items() for size in sizes})


def search(choices: Choices, cost: Cost, limit: float, *, grow: bool = True) -> Shape | None:
    """The shape, by the rule above; None where even the smallest sizes cost too much.

    Args:
        choices: allowed sizes.
        cost: of a shape; it must not fall when a size grows.
        limit: largest cost.
        grow: use the rest of the budget for single axes (step 2); without it few shapes are tried.
    """
    if cost(choices.smallest) > limit:
        return None
    ratios = choices.ratios()
    low, high = 0, len(ratios)  # ratios[low] fits, or is as small as it gets
    while high - low > 1:
        middle = (low + high) // 2
        if cost(choices.at(ratios[middle])) <= limit:
            low = middle
        else:
            high = middle
    shape = choices.at(ratios[low])
    if cost(shape) > limit:
        shape = choices.smallest
    return _grown(choices, shape, cost, limit) if grow else shape


def _grown(choices: Choices, shape: Shape, cost: Cost, limit: float) -> Shape:
    while True:
        larger = {axis: [s for s in sizes if s > shape[axis]][:1] for axis, sizes in choices.allowed.items()}
        fitting = [axis for axis, sizes in larger.items() if sizes and cost({**shape, axis: sizes[0]}) <= limit]
        if not fitting:
            return shape
        chosen = min(fitting, key=lambda axis: shape[axis] / choices.original[axis])
        shape = {**shape, chosen: larger[chosen][0]}
