"""Figures of tasks: in journal rows and manifests (`NAME`, with its interval `NAME_low`, `NAME_high`), and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

Figures = dict[str, Any]
"""Figures of a model by name, as in manifests and tables."""
NAMES: Final = ("accuracy", "accuracy_per_character", "accuracy_per_token", "exact_match", "bits_per_byte")
"""Names of all figures; the first one that a task has is its headline."""


def names_in(figures: Mapping[str, float]) -> Iterator[str]:
    """The names of the figures that a task has."""
    return (name for name in NAMES if name in figures)


def figures_line(figures: Mapping[str, float]) -> str:
    """Formats a task's figures in one line."""
    parts = [f"{name.replace('_', ' ')} {with_interval(figures, name)}" for name in names_in(figures)]
    cut = f", {figures['truncated']:,} truncated" if figures.get("truncated") else ""
    return f"{', '.join(parts)} ({figures['samples']:,} samples{cut})"


def with_interval(figures: Mapping[str, float], name: str) -> str:
    """Formats a figure and its interval."""
    low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
    return f"{figures[name]:.4f}" + ("" if low is None or high is None else f" [{low:.4f}, {high:.4f}]")
