"""Report of a pruning: sizes and held-out metrics before and after, for the manifest and as a table. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.base.directory import Manifest
from pipeline.compress.pruning.rules import PruningPlan
from pipeline.evaluation.heldout.before_after import add_measured, changes, measured, scored_data, table_of
from pipeline.models.folder.model_folder import ModelFolder


def details(
    plan: PruningPlan, shape: Mapping[str, int], folder: Path, *, before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """Details for the manifest: sizes, parameters, and held-out metrics before and after.

    Args:
        plan: plan of the pruning.
        shape: axis -> size of the result.
        folder: folder of the result.
        before: metrics of the original, by `measure`.
        after: metrics of the result, by `measure`.
    """
    result = ModelFolder.open(folder)
    pruning = {
        "shape": {axis: [size, shape[axis]] for axis, size in plan.anatomy.sizes.items()},
        "metric": plan.config.importance.metric,
        "depth": plan.config.importance.depth,
        "calibration_tokens": plan.config.calibration.samples * plan.config.data.sequence_length,
    }
    return {
        "parameters": result.parameters,
        "weight_bytes": result.weight_bytes,
        "pruning": {**pruning, "parameters_before": plan.source.parameters},
        "before": measured(before),
        "after": measured(after),
        "data": scored_data(before),
    }


def step_numbers(recorded: dict[str, Any]) -> dict[str, Any]:
    """A pruning's numbers for the lineage: sizes before and after, importance, bytes and loss before and after."""
    pruning = recorded["pruning"]
    found: dict[str, Any] = {
        "parameters_before": pruning["parameters_before"],
        "parameters_after": recorded["parameters"],
    }
    found |= {axis: f"{old:,} -> {new:,}" for axis, (old, new) in pruning["shape"].items() if old != new}
    found |= {key: pruning[key] for key in ("metric", "depth", "calibration_tokens")}
    found |= changes(recorded)
    return {key: value for key, value in found.items() if value is not None}


def unseen_line(unseen: Sequence[tuple[int, int]], *, shown: int = 8) -> str:
    """A warning about each (layer, expert) that got no calibration token and loses channels."""
    places = ", ".join(f"expert {expert} of layer {layer}" for layer, expert in unseen[:shown])
    more = f" and {len(unseen) - shown} more" if len(unseen) > shown else ""
    why = f"warning: {places}{more} got no token of the calibration: which of their channels go is arbitrary"
    return f"{why}\n  try: a larger calibration.samples, or a smaller num_experts"


def table(manifest: Manifest) -> Table:
    """A table with the columns before and after, from the manifest alone."""
    recorded = manifest.details
    pruning = recorded["pruning"]
    shown = table_of(manifest, after=recorded["after"]["dtype"])
    share = recorded["parameters"] / pruning["parameters_before"]
    shown.add_row("parameters", f"{pruning['parameters_before']:,}", f"{recorded['parameters']:,} ({share:.1%})")
    for axis, (old, new) in pruning["shape"].items():
        shown.add_row(axis, f"{old:,}", f"{new:,}")
    add_measured(shown, recorded)
    return shown
