"""Weighted set cover by local search: a cheap set of cells that has all wanted bits (simulated annealing).

One greedy pass overpays for the cells it took early, when nearly every cell brought something new: the best of 120
passes, which did not count references, took 869 CPU seconds, and what this search found 801 (716 by the cost model).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A candidate with the bits it covers; `cost` is its own, and cells share the references that they need."""

    key: tuple[Hashable, ...]
    bits: int
    cost: float
    needs: frozenset[Hashable]


@dataclass(frozen=True)
class Search:
    """The search problem.

    Attributes:
        wanted: the bits that must be covered.
        candidates: random cells that cover a bit, which is given by its number.
        reference_cost: the cost of one reference that cells need.
        random: random generator.
    """

    wanted: int
    candidates: Callable[[int, random.Random], Iterable[Cell]]
    reference_cost: float
    random: random.Random

    def cheapest(self, rounds: int) -> list[Cell]:
        """The cheapest cover found in so many rounds."""
        current = best = self._completed([])
        for number in range(rounds):
            # more expensive covers are accepted too, ever less so: the temperature falls from 1 % to a hundredth of it
            temperature = 0.01 * self.total(best) * 0.01 ** (number / rounds)
            removed = self.random.randint(1, 6)
            candidate = self._completed(self.random.sample(current, max(0, len(current) - removed)))
            if self.total(candidate) < self.total(current) - temperature * math.log(1 - self.random.random()):
                current = candidate
            best = min(best, current, key=self.total)
        return best

    def total(self, cells: Sequence[Cell]) -> float:
        needed = set(itertools.chain.from_iterable(cell.needs for cell in cells))
        return sum(cell.cost for cell in cells) + self.reference_cost * len(needed)

    def _completed(self, cells: Sequence[Cell]) -> list[Cell]:
        """Adds cells for all missing bits, and removes redundant ones."""
        chosen, references, missing = list(cells), set[Hashable](), self.wanted
        for cell in chosen:
            missing &= ~cell.bits
            references |= cell.needs
        while missing:
            bit = self.random.choice([bit for bit in range(missing.bit_length()) if missing >> bit & 1])

            def value(cell: Cell, missing: int = missing, known: frozenset[Hashable] = frozenset(references)) -> float:
                return (cell.bits & missing).bit_count() / (cell.cost + self.reference_cost * len(cell.needs - known))

            best = max(self.candidates(bit, self.random), key=value, default=None)
            if best is None:
                continue
            chosen.append(best)
            references |= best.needs
            missing &= ~best.bits
        return self._without_redundant(chosen)

    def _without_redundant(self, cells: list[Cell]) -> list[Cell]:
        """Removes cells whose bits the others cover too, the most expensive first."""
        needed = list(cells)
        for cell in sorted(cells, key=lambda each: each.cost, reverse=True):
            others = [each for each in needed if each is not cell]
            covered = 0
            for each in others:
                covered |= each.bits
            if not self.wanted & ~covered:
                needed = others
        return needed
