"""Verdicts as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pipeline.proof.judgement import ProofResult

_MOST = 12
"""Tensors that are listed when gradients are wrong."""


def show(verdicts: Sequence[ProofResult], *, gradients: bool = False) -> None:
    """Prints what was compared, what was allowed, and where it was furthest off; then what is wrong."""
    console = Console(highlight=False)
    if not console.is_terminal:  # a log has no edge to wrap at
        console = Console(highlight=False, width=140)
    if any(verdict.gaps for verdict in verdicts):
        console.print(_overview(verdicts))
    for verdict in verdicts:
        if verdict.failed is not None:
            console.print(f"[bold red]{verdict.precision}: the run failed[/]")
            console.print(verdict.failed, markup=False)
        elif gradients or verdict.beyond():
            console.print(_tensors(verdict, everything=gradients))


def _overview(verdicts: Sequence[ProofResult]) -> Table:
    table = Table()
    for column in ("precision", "compared", "furthest off", "allowed", "at", ""):
        table.add_column(column, justify="right" if column in ("furthest off", "allowed") else "left")
    for verdict in verdicts:
        for gap in verdict.gaps:
            word = "[green]equal[/]" if gap.holds else "[bold red]not equal[/]"
            table.add_row(verdict.precision, gap.what, f"{gap.difference:.1e}", f"{gap.tolerance:.1e}", gap.at, word)
    return table


def _tensors(verdict: ProofResult, *, everything: bool) -> Table:
    assert verdict.gradient is not None
    assert verdict.tolerance is not None
    beyond = verdict.beyond()
    rows = beyond[:_MOST]
    if everything:
        rows = [(name, off, verdict.tolerance.gradient.get(name, 0.0)) for name, off in verdict.gradient.items()]
    title = f"{verdict.precision}: gradients of step 1, {len(beyond)} of {len(verdict.gradient)} tensors not equal"
    table = Table("tensor", title=title)
    table.add_column("relative difference", justify="right")
    table.add_column("allowed", justify="right")
    for name, off, allowed in rows:
        table.add_row(name, f"{off:.1e}", f"{allowed:.1e}", style=None if off <= allowed else "red")
    return table
