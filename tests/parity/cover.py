"""A cheap set of cells that has all that is wanted: some cells are taken out and replaced, over and over.

One greedy pass pays for what it took early, when nearly every cell brought something new: the best of 120 passes, which
knew nothing of references, took 869 CPU seconds, and what this found 801 (716 by the cost it goes by).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A candidate.

    Attributes:
        key: what it is.
        has: the bits of what it has.
        cost: of itself.
        needs: what it is compared with, which cells share.
    """

    key: tuple[Hashable, ...]
    has: int
    cost: float
    needs: frozenset[Hashable]


@dataclass(frozen=True)
class Search:
    """What is searched.

    Attributes:
        wanted: the bits that some cell must have.
        drawn: random cells that have a bit, which is given by its number.
        shared: the cost of one thing that cells need.
        draw: the randomness.
    """

    wanted: int
    drawn: Callable[[int, random.Random], Iterable[Cell]]
    shared: float
    draw: random.Random

    def cheapest(self, rounds: int) -> list[Cell]:
        """The cheapest set that was found in so many rounds."""
        now = best = self._filled([])
        for number in range(rounds):
            # dearer sets are gone on from, too, by ever less: from 1 % to a hundredth of that
            warmth = 0.01 * self.total(best) * 0.01 ** (number / rounds)
            gone = self.draw.randint(1, 6)
            tried = self._filled(self.draw.sample(now, max(0, len(now) - gone)))
            if self.total(tried) < self.total(now) - warmth * math.log(1 - self.draw.random()):
                now = tried
            best = min(best, now, key=self.total)
        return best

    def total(self, cells: Sequence[Cell]) -> float:
        """What a set costs."""
        needed = set(itertools.chain.from_iterable(cell.needs for cell in cells))
        return sum(cell.cost for cell in cells) + self.shared * len(needed)

    def _filled(self, cells: Sequence[Cell]) -> list[Cell]:
        """A set with cells for all that it lacks, and without those that bring nothing."""
        chosen, there, left = list(cells), set[Hashable](), self.wanted
        for cell in chosen:
            left &= ~cell.has
            there |= cell.needs
        while left:
            missing = self.draw.choice([bit for bit in range(left.bit_length()) if left >> bit & 1])

            def worth(cell: Cell, left: int = left, there: frozenset[Hashable] = frozenset(there)) -> float:
                return (cell.has & left).bit_count() / (cell.cost + self.shared * len(cell.needs - there))

            best = max(self.drawn(missing, self.draw), key=worth, default=None)
            if best is None:
                continue
            chosen.append(best)
            there |= best.needs
            left &= ~best.has
        return self._needed(chosen)

    def _needed(self, cells: list[Cell]) -> list[Cell]:
        """Leaves out cells whose bits the others have, too; the dearest are asked first."""
        needed = list(cells)
        for cell in sorted(cells, key=lambda each: each.cost, reverse=True):
            others = [each for each in needed if each is not cell]
            had = 0
            for each in others:
                had |= each.has
            if not self.wanted & ~had:
                needed = others
        return needed
