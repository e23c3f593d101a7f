"""Which cells of the matrix are run: `pairs.json`, in which every legal pair of values meets, or every layout.

python -m tests.parity.choice        writes pairs.json anew (after the table of legal layouts has changed)
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.parity.matrix import LAYOUT, NUMBERS, PRECISIONS, Values, config_of, is_legal

PAIRS = Path(__file__).with_name("pairs.json")

Pairs = set[tuple[str, Any, str, Any]]
"""(factor, value, factor, value): two values that meet in a cell."""


@cache
def legal_layouts() -> tuple[Values, ...]:
    """Every legal combination of the factors of `LAYOUT`."""
    combinations = (dict(zip(LAYOUT, each, strict=True)) for each in itertools.product(*LAYOUT.values()))
    return tuple(values for values in combinations if is_legal(values))


def pairs_of(values: Values, factors: Iterable[str]) -> Pairs:
    """The pairs of values that meet in a cell."""
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
    """Every value of every factor with each of the precisions that round more than fp32 does."""
    found = {(name, v, "precision", p) for name, choices in NUMBERS.items() for v in choices for p in PRECISIONS[1:]}
    for layout, precision in itertools.product(legal_layouts(), PRECISIONS[1:]):
        if is_runnable(layout, precision):
            found |= {(name, layout[name], "precision", precision) for name in LAYOUT}
    return found


def is_runnable(layout: Values, precision: str) -> bool:
    """Whether a CPU can run it: from stage 1 on DeepSpeed asks the device for fp16, and most CPUs have none."""
    return precision != "fp16" or layout["sharding"] not in ("deepspeed-1", "deepspeed-2", "deepspeed-3")


def choose(seeds: int = 120) -> list[Values]:
    """Few cells in which every legal pair meets in fp32, and every value meets bf16 and fp16: the cheapest draw."""
    exact, half = legal_pairs(), precision_pairs()

    def drawn(seed: int) -> list[Values]:
        draw = random.Random(seed)
        chosen = _cover(exact, [*LAYOUT, *NUMBERS], ("fp32",), draw)
        return chosen + _cover(half, [*LAYOUT, *NUMBERS, "precision"], PRECISIONS[1:], draw)

    return min((drawn(seed) for seed in range(seeds)), key=lambda cells: sum(map(cost, cells)))


def cost(values: Values) -> float:
    """About the CPU seconds a cell takes, fitted to 75 measured ones: ranks start, then talk per micro-batch."""
    pp = int(values["pipeline"].partition("-")[2] or 1)
    passes = values["accumulation"] * {"none": 1.0, "selective": 1.25, "full": 1.5}[values["recompute"]] / pp
    per_rank = 0.5 + passes * (1.1 + 0.5 * (values["tp"] > 1) + 0.3 * (values["cp"] != "none"))
    per_rank += values["accumulation"] * 0.3 * (values["tp"] > 1 and values["chunk"] is not None)
    per_rank += values["accumulation"] * 0.4 * values["pipeline"].startswith("zero_bubble")
    return 1 + config_of(values, "")[1] * per_rank


def _cover(wanted: Pairs, factors: list[str], precisions: tuple[str, ...], draw: random.Random) -> list[Values]:
    left, chosen = set(wanted), []
    while left:
        candidates = list(_candidates(left, precisions, draw))
        if not candidates:
            continue
        best = max(candidates, key=lambda v: len(pairs_of(v, factors) & left) / cost(v))
        chosen.append(best)
        left -= pairs_of(best, factors)
    return _needed(chosen, wanted, factors)


def _needed(cells: list[Values], wanted: Pairs, factors: list[str]) -> list[Values]:
    """Leaves out cells whose pairs the others have, too; the dearest are asked first."""
    needed = list(cells)
    for cell in sorted(cells, key=cost, reverse=True):
        others = [v for v in needed if v is not cell]
        if wanted <= {pair for v in others for pair in pairs_of(v, factors)}:
            needed = others
    return needed


def _candidates(left: Pairs, precisions: tuple[str, ...], draw: random.Random, count: int = 300) -> Iterator[Values]:
    """Random legal cells that have one of the pairs that are left."""
    a, x, b, y = draw.choice(sorted(left, key=repr))
    layouts = [v for v in legal_layouts() if v.get(a, x) == x and v.get(b, y) == y]
    for _ in range(count):
        numbers = {name: draw.choice(choices) for name, choices in NUMBERS.items()}
        numbers["precision"] = draw.choice(precisions)
        given = {name: value for name, value in ((a, x), (b, y)) if name in numbers}
        cell = {**draw.choice(layouts), **numbers, **given}
        if is_runnable(cell, cell["precision"]) and is_legal(cell):
            yield cell


def read_pairs() -> list[Values]:
    """The cells that `make test` runs."""
    cells: list[Values] = json.loads(PAIRS.read_text())
    return cells


def groups() -> list[str]:
    """The keys of `full`, without making it: every legal engine, ZeRO stage and pipeline."""
    usual = {"tp": 2, "cp": "none", "dp": 1, "extra": "none", "accumulation": 4}
    pairs = itertools.product(LAYOUT["sharding"], LAYOUT["pipeline"])
    return [f"{s},{p}" for s, p in pairs if is_legal({"sharding": s, "pipeline": p, **usual})]


def full() -> dict[str, list[Values]]:
    """Every legal layout with every recomputation, in fp32 and bf16; the other numbers take turns.

    By engine, ZeRO stage and pipeline: thousands of cells.
    """
    others = [dict(zip(NUMBERS, each, strict=True)) for each in itertools.product(*NUMBERS.values())]
    turns = itertools.cycle(random.Random(0).sample(others, len(others)))
    groups: dict[str, list[Values]] = {}
    for layout in legal_layouts():
        group = groups.setdefault(f"{layout['sharding']},{layout['pipeline']}", [])
        for recompute, precision in itertools.product(NUMBERS["recompute"], PRECISIONS[:2]):
            cell = {**layout, **next(turns), "recompute": recompute, "precision": precision}
            group += [cell] if is_legal(cell) else []
    return groups


if __name__ == "__main__":
    cells = choose()
    PAIRS.write_text("[\n" + ",\n".join(json.dumps(cell) for cell in cells) + "\n]\n")
    spent, layouts, pairs = round(sum(map(cost, cells))), len(legal_layouts()), len(legal_pairs())
    print(f"{len(cells)} cells, about {spent} CPU seconds; {layouts} legal layouts, {pairs} legal pairs")
