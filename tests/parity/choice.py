"""Selects the cells of the parity matrix to run: pairwise coverage of all legal values (`pairs.json`), or every layout.

python -m tests.parity.choice        rewrites pairs.json, in minutes (after the table of legal layouts has changed)
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.parity.matrix import LAYOUT, NUMBERS, PRECISIONS, Values, config_of, curve_of, is_legal


@dataclass(frozen=True)
class Cell:
    """A candidate with the bits it covers; `cost` is its own, and cells share the references that they need."""

    key: tuple[Hashable, ...]
    bits: int
    cost: float
    needs: frozenset[Hashable]


@dataclass(frozen=True)
class Search:
    """Weighted set cover by local search (simulated annealing): a cheap set of cells that has all wanted bits.

    One greedy pass overpays for the cells it took early, when nearly every cell brought something new: the best of 120
    passes, without references, took 869 CPU seconds, and what this search found 801 (716 by the cost model).

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


GATING_RANKS = 4
PAIRS = Path(__file__).with_name("pairs.json")

Pairs = set[tuple[str, Any, str, Any]]
"""(factor, value, factor, value): two values that occur together in a cell."""


@cache
def legal_layouts() -> tuple[Values, ...]:
    """Every legal combination of the factors of `LAYOUT`."""
    combinations = (dict(zip(LAYOUT, each, strict=True)) for each in itertools.product(*LAYOUT.values()))
    return tuple(values for values in combinations if is_legal(values))


def pairs_of(values: Values, factors: Iterable[str]) -> Pairs:
    """The pairs of values that occur together in a cell."""
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(factors, 2)}


def legal_pairs() -> Pairs:
    """Every pair of values that some legal cell has, in any precision."""
    found = {pair for layout in legal_layouts() for pair in pairs_of(layout, LAYOUT)}
    for a, b in itertools.combinations(NUMBERS, 2):
        found |= {(a, x, b, y) for x in NUMBERS[a] for y in NUMBERS[b]}
    for a, b in itertools.product(LAYOUT, NUMBERS):
        for x, y in itertools.product(LAYOUT[a], NUMBERS[b]):
            if any(is_legal({**layout, b: y}) for layout in legal_layouts() if layout[a] == x):
                found.add((a, x, b, y))
    return found


def precision_pairs() -> Pairs:
    """Every value of every factor with each of the half precisions."""
    found = {(name, v, "precision", p) for name, choices in NUMBERS.items() for v in choices for p in PRECISIONS[1:]}
    for layout, precision in itertools.product(legal_layouts(), PRECISIONS[1:]):
        if is_runnable(layout, precision):
            found |= {(name, layout[name], "precision", precision) for name in LAYOUT}
    return found


def is_runnable(layout: Values, precision: str) -> bool:
    """Whether a CPU can run it: from stage 1 on DeepSpeed requires a device with fp16, which most CPUs lack."""
    return precision != "fp16" or layout["sharding"] not in ("deepspeed-1", "deepspeed-2", "deepspeed-3")


REFERENCE = 1.7
"""CPU seconds of one reference run, which cells with the same training curve share."""


def choose(rounds: int = 6000, seed: int = 2) -> list[Values]:
    """A cheap set of cells that covers every legal pair in fp32, and every value with bf16 and fp16."""
    chosen = Search((1 << len(_wanted())) - 1, _candidates, REFERENCE, random.Random(seed)).cheapest(rounds)
    return [_values(*cell.key) for cell in chosen]


def cost(values: Values) -> float:
    """Estimated CPU seconds of a cell, fitted to 69 measured ones: a cost per rank and a cost per micro-batch.

    The typical error is 15 %. DeepSpeed's ZeRO-3 is expensive, most of all with context parallelism: two cells of eight
    such ranks took an eighth of the time of all cells.
    """
    ranks = config_of(values, "")[1]
    passes = values["accumulation"] / int(values["pipeline"].partition("-")[2] or 1)
    zero3, context, mode = (
        values["sharding"] == "deepspeed-3",
        values["cp"] != "none",
        values["activation_checkpointing"],
    )
    per_pass = 0.7 + (values["tp"] > 1) + 0.3 * context + zero3 * (1.7 + 0.35 * context * (ranks - 1))
    per_rank = 0.9 + {"torch-0": 0, "torch-2": 0.5, "torch-3": 0.5, "deepspeed-3": 0.6}.get(values["sharding"], 0.3)
    per_rank += passes * per_pass * {"none": 1.0, "selective": 1.25, "full": 1.5}[mode]
    per_rank += passes * (mode == "selective")
    per_rank += values["accumulation"] * 0.4 * values["pipeline"].startswith("zero_bubble")
    return float(ranks * per_rank)


@cache
def _wanted() -> tuple[tuple[bool, *tuple[Any, ...]], ...]:
    """Every pair to cover, preceded by whether it must be covered in fp32."""
    return tuple(sorted([(True, *p) for p in legal_pairs()] + [(False, *p) for p in precision_pairs()], key=repr))


@cache
def _bits() -> dict[tuple[Any, ...], int]:
    return {pair: 1 << number for number, pair in enumerate(_wanted())}


def _values(layout: int, *numbers: Any) -> Values:
    return {**legal_layouts()[layout], **dict(zip([*NUMBERS, "precision"], numbers, strict=True))}


@cache
def _cell(layout: int, *numbers: Any) -> Cell | None:
    """A candidate, by the index of its layout; None if it is illegal or a CPU cannot run it."""
    values = _values(layout, *numbers)
    if not (is_runnable(values, values["precision"]) and is_legal(values)):
        return None
    fp32, curve = values["precision"] == "fp32", curve_of(values)
    pairs = pairs_of(values, [*LAYOUT, *NUMBERS, "precision"])
    covered = sum(_bits().get((fp32, *pair), 0) for pair in pairs)
    return Cell((layout, *numbers), covered, cost(values), frozenset({curve, (*curve[:-1], "fp32")}))


@cache
def _having(a: str, x: Any, b: str, y: Any) -> list[int]:
    return [n for n, v in enumerate(legal_layouts()) if v.get(a, x) == x and v.get(b, y) == y]


def _candidates(number: int, generator: random.Random, count: int = 60) -> Iterator[Cell]:
    """Random legal cells that cover a pair of `_wanted`."""
    fp32, a, x, b, y = _wanted()[number]
    for _ in range(count):
        numbers = {name: generator.choice(choices) for name, choices in NUMBERS.items()}
        numbers["precision"] = "fp32" if fp32 else generator.choice(PRECISIONS[1:])
        numbers |= {name: value for name, value in ((a, x), (b, y)) if name in numbers}
        cell = _cell(generator.choice(_having(a, x, b, y)), *numbers.values())
        if cell is not None:
            yield cell


def read_pairs() -> list[Values]:
    """The cells that cover all pairs (`make sweep-tests`)."""
    cells: list[Values] = json.loads(PAIRS.read_text())
    return cells


def gating() -> list[Values]:
    """The cells that CI runs for a few steps: of those on at most 4 ranks, as few as have every value."""
    small = [values for values in read_pairs() if config_of(values, "")[1] <= GATING_RANKS]
    missing = {(name, value) for values in small for name, value in values.items()}
    chosen: list[Values] = []
    while missing:
        best = max(small, key=lambda values: len(missing & set(values.items())) / (5 + cost(values)))
        chosen.append(best)
        missing -= set(best.items())
    return chosen


def gating_curves() -> list[Values]:
    """One cell per engine for the whole curve: of those on at most 4 ranks, the one with the most uncommon values."""
    small = [values for values in read_pairs() if config_of(values, "")[1] <= GATING_RANKS]
    plainest = {name: choices[0] for name, choices in (LAYOUT | NUMBERS).items()}
    engines = {engine: [v for v in small if v["sharding"].startswith(engine)] for engine in ("deepspeed", "torch")}
    return [
        max(cells, key=lambda values: sum(values[name] != plainest[name] for name in plainest))
        for cells in engines.values()
    ]


def groups() -> list[str]:
    """The keys of `full`, without computing it: every legal engine, ZeRO stage and pipeline schedule."""
    usual = {"tp": 2, "cp": "none", "dp": 1, "extra": "none", "accumulation": 4}
    pairs = itertools.product(LAYOUT["sharding"], LAYOUT["pipeline"])
    return [f"{s},{p}" for s, p in pairs if is_legal({"sharding": s, "pipeline": p, **usual})]


def full() -> dict[str, list[Values]]:
    """Every legal layout with every mode of activation checkpointing, in fp32 and bf16; other factors alternate.

    By engine, ZeRO stage and pipeline schedule: thousands of cells. And every layout once with Muon, and
    once with every size of expert parallelism, in fp32.
    """
    others = [dict(zip(NUMBERS, each, strict=True)) for each in itertools.product(*NUMBERS.values())]
    turns = itertools.cycle(random.Random(0).sample(others, len(others)))
    groups: dict[str, list[Values]] = {}
    for layout in legal_layouts():
        group = groups.setdefault(f"{layout['sharding']},{layout['pipeline']}", [])
        for mode, precision in itertools.product(NUMBERS["activation_checkpointing"], PRECISIONS[:2]):
            cell = {**layout, **next(turns), "activation_checkpointing": mode, "precision": precision}
            group += [cell] if is_legal(cell) else []
        # offloaded states are refused with Muon
        muon = {**layout, **next(turns), "precision": "fp32", "muon": True}
        groups.setdefault("with Muon", []).extend([muon] if is_legal(muon) else [])
        for size in (2, 4):
            experts = {**layout, **next(turns), "precision": "fp32", "ep": size}
            groups.setdefault("with expert parallelism", []).extend([experts] if is_legal(experts) else [])
    return groups


if __name__ == "__main__":
    cells = choose()
    PAIRS.write_text("[\n" + ",\n".join(json.dumps(cell) for cell in cells) + "\n]\n")
    curves = {curve_of({**v, **p}) for v in cells for p in ({}, {"precision": "fp32"})}
    spent, layouts, pairs = round(sum(map(cost, cells))), len(legal_layouts()), len(legal_pairs())
    print(f"{len(cells)} cells, about {spent} CPU seconds, beside {len(curves)} references")
    print(f"{layouts} legal layouts, {pairs} legal pairs")
