"""Chooses the schemes of a model's layers within the byte budget of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType

from foundation.directory import Details
from pipeline.compress.quantization.budget import UNCHANGED, Budget, scheme_of
from pipeline.compress.quantization.calibration_rules import open_split
from pipeline.compress.quantization.rules import QuantizationPlan, layer_scheme
from pipeline.compress.quantization.sensitivity import measure_units
from pipeline.data.dataset import choose_windows
from pipeline.models.folder.loading import load_model

Show = Callable[[int, int], None]
Measured = Mapping[str, Mapping[str, float]]
"""Unit -> choice -> mean KL divergence to the original in nats when only this unit is changed."""
_BUCKETS = 8192


def decide(plan: QuantizationPlan, *, show: Show) -> tuple[QuantizationPlan, Details]:
    """Measures the units and chooses their schemes.

    Args:
        plan: plan with a budget.
        show: function called with (choices measured, all choices).

    Returns:
        The plan with the chosen schemes or types, and details for the manifest: budget in bytes, planned bytes, and for
        each unit the choice, its bytes, and the measured KL divergence of every choice, largest first.
    """
    budget = plan.budget
    assert budget is not None
    model = load_model(plan.source.path, dtype=torch.float32)
    dtype = getattr(torch, plan.config.dtype or plan.source.dtype)
    measured = measure_units(model, budget, _batches(plan), dtype=dtype, show=show)
    chosen = choose(budget, measured)
    rows: list[dict[str, Any]] = [
        {"unit": name, "choice": choice, "bytes": budget.units[name].bytes[choice], "kl": measured[name]}
        for name, choice in chosen.items()
    ]
    rows.sort(key=lambda row: -max(row["kl"].values()))
    known = {"budget_bytes": budget.limit, "planned_bytes": budget.total(chosen), "units": rows}
    return _applied(plan, chosen), known


def sensitivity_rows(known: Details) -> list[Details]:
    """KL divergence of each unit in its worst choice, for the report page; with bytes if that choice was taken.

    Args:
        known: details that `decide` returned.
    """
    rows = []
    for unit in known["units"]:
        worst = max(unit["kl"], key=lambda choice: unit["kl"][choice])
        size = unit["bytes"] if worst == unit["choice"] else None
        rows.append({"layer": unit["unit"], "scheme": worst, "kl": unit["kl"][worst], "bytes": size})
    return rows


def _applied(plan: QuantizationPlan, chosen: dict[str, str]) -> QuantizationPlan:
    if plan.gguf is not None:
        types = {name: GGMLQuantizationType[each] for name, each in chosen.items() if each != UNCHANGED}
        tensors = tuple(replace(each, type=types.get(each.name, each.type)) for each in plan.gguf.tensors)
        return replace(plan, gguf=replace(plan.gguf, tensors=tensors))
    assert plan.budget is not None
    of_unit = {layer: chosen[name] for name, unit in plan.budget.units.items() for layer in unit.layers}
    schemes = {
        name: scheme_of(of_unit[name]) if name in of_unit else layer_scheme(plan.config, name)
        for name in plan.layers
        if of_unit.get(name) != UNCHANGED
    }
    return replace(plan, schemes=schemes, layers={name: plan.layers[name] for name in schemes})


def _batches(plan: QuantizationPlan) -> tuple[torch.Tensor, ...]:
    """Token ids [B, T] of the calibration split."""
    config = plan.config
    assert config.budget is not None
    dataset = open_split(config.data, config.calibration)
    windows = choose_windows(dataset.windows, min(config.budget.samples, dataset.windows))
    rows = torch.from_numpy(dataset.read(windows)[:, :-1]).long()
    return tuple(rows.split(config.data.batch_size))


def choose(budget: Budget, measured: Measured) -> dict[str, str]:
    """Makes a choice for every unit within the budget; returns unit -> choice.

    The choices minimize the sum of the KL divergences measured for one unit at a time: a knapsack with one choice per
    unit, solved by dynamic programming over the bytes above the smallest size. Bytes are rounded up to buckets, so the
    budget is never exceeded. Then single upgrades that still fit use the bytes lost to rounding. The greedy choice (the
    most KL saved per byte, step by step) is returned if its KL is lower: with very many units rounding loses more than
    greed does. The KL of several changes together is not exactly their sum; the result is scored as a whole.

    Args:
        budget: budget in bytes, large enough for the smallest choice of every unit.
        measured: KL divergence of every unit and choice, except UNCHANGED, which counts as 0.
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
    """Takes the upgrade that saves most KL per byte, as long as an upgrade fits."""
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
