"""Chooses the scheme of every unit of a model within a byte budget. No torch.

The choice has the smallest sum of the KL divergences that were measured for one unit at a time: a knapsack with one
choice for each unit, solved by dynamic programming over the bytes above the smallest size. Bytes are counted in
buckets, rounded up, so that the budget holds; single upgrades that still fit fill what rounding left. Where a greedy
choice (the most KL saved per byte, step by step) is better than that, it is taken: of very many units rounding costs
more than greed. The KL of several changes together is not exactly the sum of theirs; the result is scored as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.compress.quantization.budget import UNCHANGED, Budget

Measured = Mapping[str, Mapping[str, float]]
"""Unit -> choice -> mean KL divergence to the original in nats when only this unit is changed."""

_BUCKETS = 8192


def choose(budget: Budget, measured: Measured) -> dict[str, str]:
    """Chooses for every unit, within the budget; returns unit -> choice.

    Args:
        budget: budget that the smallest choices meet.
        measured: KL divergence of every unit and choice but UNCHANGED, which counts as 0.
    """
    kl = {name: {UNCHANGED: 0.0, **measured[name]} for name in budget.units}
    greedy = _upgraded(budget, kl, budget.smallest())
    exact = _upgraded(budget, kl, _by_buckets(budget, kl))
    return min((exact, greedy), key=lambda chosen: sum(kl[name][each] for name, each in chosen.items()))


def _by_buckets(budget: Budget, kl: Measured) -> dict[str, str]:
    smallest = budget.smallest()
    size = max(1, -(-(budget.limit - budget.total(smallest)) // _BUCKETS))
    best = np.zeros(_BUCKETS + 1)
    picks: list[tuple[str, list[str], list[int], np.ndarray]] = []
    for name, unit in budget.units.items():
        choices = list(unit.bytes)
        costs = [-(-(unit.bytes[each] - unit.bytes[smallest[name]]) // size) for each in choices]
        rows = np.full((len(choices), _BUCKETS + 1), np.inf)
        for row, (each, cost) in enumerate(zip(choices, costs, strict=True)):
            if cost <= _BUCKETS:
                rows[row, cost:] = best[: _BUCKETS + 1 - cost] + kl[name][each]
        picks.append((name, choices, costs, rows.argmin(0).astype(np.uint8)))
        best = rows.min(0)
    left, chosen = _affordable(budget, smallest, size), {}
    for name, choices, costs, pick in reversed(picks):
        row = int(pick[left])
        chosen[name] = choices[row]
        left -= costs[row]
    return {name: chosen[name] for name in budget.units}


def _affordable(budget: Budget, smallest: Mapping[str, str], size: int) -> int:
    return min(_BUCKETS, (budget.limit - budget.total(smallest)) // size)


def _upgraded(budget: Budget, kl: Measured, chosen: Mapping[str, str]) -> dict[str, str]:
    """Takes the upgrade that saves most KL per byte, as long as one fits."""
    found = dict(chosen)
    left = budget.limit - budget.total(found)
    while steps := [
        ((kl[name][found[name]] - kl[name][each]) / more, name, each, more)
        for name, unit in budget.units.items()
        for each, size in unit.bytes.items()
        if 0 < (more := size - unit.bytes[found[name]]) <= left and kl[name][each] < kl[name][found[name]]
    ]:
        _, name, each, more = max(steps)
        found[name] = each
        left -= more
    return found
