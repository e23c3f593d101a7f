"""Prints the results of a proof as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pipeline.plan.proof.equivalence import ProofResult

_MAX_ROWS = 12
"""Most tensors listed when gradients are out of tolerance."""


def print_results(results: Sequence[ProofResult], *, gradients: bool = False) -> None:
    """Prints the largest difference of every quantity with its tolerance and location; then errors and gradients."""
    console = Console(highlight=False)
    if not console.is_terminal:  # a log is not wrapped at 80 columns
        console = Console(highlight=False, width=140)
    if any(result.comparisons for result in results):
        console.print(_overview(results))
    for result in results:
        if result.error is not None:
            console.print(f"[bold red]{result.precision}: the run failed[/]")
            console.print(result.error, markup=False)
        elif gradients or result.wrong_gradients():
            console.print(_tensors(result, everything=gradients))


def _overview(results: Sequence[ProofResult]) -> Table:
    table = Table()
    for column in ("precision", "quantity", "largest difference", "tolerance", "at", ""):
        table.add_column(column, justify="right" if column in ("largest difference", "tolerance") else "left")
    for result in results:
        for row in result.comparisons:
            status = "[green]equal[/]" if row.passed else "[bold red]not equal[/]"
            numbers = (f"{row.difference:.1e}", f"{row.tolerance:.1e}")
            table.add_row(result.precision, row.quantity, *numbers, row.location, status)
    return table


def _tensors(result: ProofResult, *, everything: bool) -> Table:
    assert result.gradient is not None
    assert result.tolerance is not None
    wrong = result.wrong_gradients()
    rows = wrong[:_MAX_ROWS]
    if everything:
        tolerances = result.tolerance.gradient
        rows = [(name, difference, tolerances.get(name, 0.0)) for name, difference in result.gradient.items()]
    title = f"{result.precision}: gradients of step 1, {len(wrong)} of {len(result.gradient)} tensors not equal"
    table = Table("tensor", title=title)
    table.add_column("relative difference", justify="right")
    table.add_column("tolerance", justify="right")
    for name, difference, tolerance in rows:
        style = None if difference <= tolerance else "red"
        table.add_row(name, f"{difference:.1e}", f"{tolerance:.1e}", style=style)
    return table
