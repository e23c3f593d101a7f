"""Chooses the schemes of a model's layers within the byte budget of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gguf import GGMLQuantizationType

from pipeline.compress.quantization.budget import UNCHANGED, scheme_of
from pipeline.compress.quantization.calibration_rules import open_split
from pipeline.compress.quantization.choice import choose
from pipeline.compress.quantization.rules import QuantizationPlan, layer_scheme
from pipeline.compress.quantization.sensitivity import measure_units
from pipeline.data.dataset import choose_windows
from pipeline.models.folder.loading import load_model

Show = Callable[[int, int], None]


def decide(plan: QuantizationPlan, *, show: Show) -> tuple[QuantizationPlan, dict[str, Any]]:
    """Measures the units and chooses their schemes.

    Args:
        plan: plan with a budget.
        show: called with (choices measured, all).

    Returns:
        The plan with the chosen schemes or types, and details for the manifest: budget in bytes, planned bytes, and per
        unit the choice, its bytes, and the measured KL divergence of every choice, largest first.
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


def sensitivity_rows(known: dict[str, Any]) -> list[dict[str, Any]]:
    """KL divergence of each unit in its worst choice, for the report page; with bytes if that was chosen.

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
