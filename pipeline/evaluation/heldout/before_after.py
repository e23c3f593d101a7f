"""Held-out metrics before and after a compression, for manifest, lineage and table. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from foundation.directory import Manifest
from foundation.task_figures import Figures
from pipeline.runtime.metrics.perplexity import show_bits_per_byte

_MEASURED = (
    "loss_nats",
    "perplexity",
    "bits_per_byte",
    "tokens",
    "tokens_per_second",
    "dtype",
    "device",
    "weight_bytes",
)
_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "weights on disk": ("weight_bytes", lambda value: f"{value / 1e6:.2f} MB"),
    "bits per weight, all": ("bits_per_weight", lambda value: f"{value:.2f}"),
    "held-out loss, nats/token": ("loss_nats", lambda value: f"{value:.4f}"),
    "perplexity": ("perplexity", lambda value: f"{value:.3f}"),
    "bits per byte": ("bits_per_byte", show_bits_per_byte),
    "tokens/s": ("tokens_per_second", lambda value: f"{value:,.0f}"),
}
"""Row -> (key of the row's figure, function that formats it)."""


def measured(side: Mapping[str, Any]) -> Figures:
    """The measured figures of `measure` that the manifest keeps."""
    return {key: side[key] for key in _MEASURED if key in side}


def scored_data(before: Mapping[str, Any]) -> Figures:
    """The data on which both sides were measured."""
    return {key: before[key] for key in ("data", "split", "sequence_length")}


def changes(recorded: Mapping[str, Any]) -> Figures:
    """Bytes and loss before and after, for the lineage.

    Args:
        recorded: details of a manifest.
    """
    sides = {name: recorded[name] for name in ("before", "after")}
    keys = ("weight_bytes", "loss_nats")
    return {f"{key}_{name}": side.get(key) for key in keys for name, side in sides.items()}


def table_of(manifest: Manifest, *, after: str) -> Table:
    """A table with the columns before and after, without rows yet.

    Args:
        manifest: manifest of the result.
        after: short text on the result for the head of its column, e.g. its dtype.
    """
    recorded = manifest.details
    before = recorded["before"]
    shown = Table(title=f"{manifest.config['model']} -> {manifest.config['output']}")
    shown.add_column("")
    shown.add_column(f"before ({before['dtype']})", justify="right")
    shown.add_column(f"after ({after})", justify="right")
    shown.caption = f"{recorded['data']['split']} split, {before['tokens']:,} tokens scored, on {before['device']}"
    return shown


def add_measured(shown: Table, recorded: Mapping[str, Any]) -> None:
    """Adds a row for each metric that either side has; a dash where one side lacks it."""
    sides = recorded["before"], recorded["after"]
    for name, (key, show) in _ROWS.items():
        if any(key in side for side in sides):
            shown.add_row(name, *(show(side[key]) if key in side else "-" for side in sides))
