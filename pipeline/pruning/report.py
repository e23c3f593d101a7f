"""Report of a pruning: sizes and held-out metrics before and after, for the manifest and as a table. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.base.directory import Manifest
from pipeline.evaluation.model_folder import ModelFolder
from pipeline.metrics.units import show_bits_per_byte
from pipeline.pruning.rules import PruningPlan

_MEASURED = (
    *("loss_nats", "perplexity", "bits_per_byte", "tokens", "tokens_per_second"),
    *("dtype", "device", "weight_bytes"),
)


def details(
    plan: PruningPlan, shape: Mapping[str, int], folder: Path, *, before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """Details for the manifest: sizes, parameters, and held-out metrics before and after.

    Args:
        plan: of the pruning.
        shape: axis -> size of the result.
        folder: the result.
        before: of the original, by `measure`.
        after: of the result.
    """
    result = ModelFolder.open(folder)
    pruning = {
        "shape": {axis: [size, shape[axis]] for axis, size in plan.anatomy.sizes.items()},
        "metric": plan.config.importance.metric,
        "depth": plan.config.importance.depth,
        "calibration_tokens": plan.config.calibration.samples * plan.config.data.sequence_length,
        "experimental": None if plan.config.experimental is None else plan.config.experimental.model_dump(),
    }
    sides = {
        name: {key: side[key] for key in _MEASURED if key in side}
        for name, side in (("before", before), ("after", after))
    }
    return {
        "parameters": result.parameters,
        "weight_bytes": result.weight_bytes,
        "pruning": {**pruning, "parameters_before": plan.source.parameters},
        **sides,
        "data": {key: before[key] for key in ("data", "split", "sequence_length")},
    }


def step_numbers(recorded: dict[str, Any]) -> dict[str, Any]:
    """A pruning's numbers for the lineage: what was cut, by which importance, bytes and loss before and after."""
    before, after, pruning = recorded["before"], recorded["after"], recorded["pruning"]
    found: dict[str, Any] = {
        "parameters_before": pruning["parameters_before"],
        "parameters_after": recorded["parameters"],
    }
    found |= {axis: f"{old:,} -> {new:,}" for axis, (old, new) in pruning["shape"].items() if old != new}
    found |= {key: pruning[key] for key in ("metric", "depth", "calibration_tokens", "experimental")}
    for key in ("weight_bytes", "loss_nats"):
        found |= {f"{key}_before": before.get(key), f"{key}_after": after.get(key)}
    return {key: value for key, value in found.items() if value is not None}


def table(manifest: Manifest) -> Table:
    """A table with the columns before and after, from the manifest alone."""
    recorded = manifest.details
    before, after, pruning = recorded["before"], recorded["after"], recorded["pruning"]
    shown = Table(title=f"{manifest.config['model']} -> {manifest.config['output']}")
    shown.add_column("")
    shown.add_column(f"before ({before['dtype']})", justify="right")
    shown.add_column(f"after ({after['dtype']})", justify="right")
    share = recorded["parameters"] / pruning["parameters_before"]
    shown.add_row("parameters", f"{pruning['parameters_before']:,}", f"{recorded['parameters']:,} ({share:.1%})")
    for axis, (old, new) in pruning["shape"].items():
        shown.add_row(axis, f"{old:,}", f"{new:,}")
    for name, key, show in _ROWS:
        shown.add_row(name, *(show(side[key]) for side in (before, after)))
    shown.caption = f"{recorded['data']['split']} split, {before['tokens']:,} tokens scored, on {before['device']}"
    return shown


_ROWS: tuple[tuple[str, str, Any], ...] = (
    ("weights on disk", "weight_bytes", lambda value: f"{value / 1e6:.2f} MB"),
    ("held-out loss, nats/token", "loss_nats", lambda value: f"{value:.4f}"),
    ("perplexity", "perplexity", lambda value: f"{value:.3f}"),
    ("bits per byte", "bits_per_byte", show_bits_per_byte),
    ("tokens/s", "tokens_per_second", lambda value: f"{value:,.0f}"),
)
