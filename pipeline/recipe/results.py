"""The end of a recipe: all its models side by side, as a table, a picture and files. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.comparison.candidates import Wanted
from pipeline.comparison.frontier import frontier
from pipeline.comparison.rows import Row, as_csv, as_json
from pipeline.comparison.size_quality import save_svg
from pipeline.comparison.table import comparison_tables
from pipeline.recipe.steps import Recipe

NAME = "frontier"
"""Of the files with the results: NAME.json, NAME.csv, NAME.svg."""
_TABLE_WIDTH = 118
"""Columns that the widest table takes, where the terminal is narrower or there is none."""


def write_results(recipe: Recipe) -> list[Row]:
    """Evaluates the models that are there, prints the table and writes the files.

    The first is the reference of the KL divergences: the model in floating point that was quantized.

    Raises:
        DataError: a consumer fails.
    """
    models = {name: folder for name, folder in recipe.models.items() if folder.is_dir()}
    told = Console(stderr=True)
    told.print("\n== Evaluate: all models side by side")
    rows = frontier(
        models,
        data=recipe.config.data,
        wanted=Wanted(prompts=tuple(recipe.config.prompts)),
        say=lambda line: told.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    written = _write(rows, recipe.output)
    shown = Console(width=max(Console().width, _TABLE_WIDTH))
    for table in comparison_tables(rows, title=f"{recipe.config.model}, compressed"):
        shown.print(table)
    for name in recipe.models.keys() - models.keys():
        shown.print(f"{name}: not accepted; the message of its step is above", markup=False, highlight=False)
    shown.print(f"wrote {', '.join(map(str, written))}", markup=False, highlight=False, soft_wrap=True)
    return rows


def _write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """The files that were written."""
    paths = {suffix: folder / f"{NAME}.{suffix}" for suffix in ("json", "csv", "svg")}
    paths["json"].write_text(as_json(rows))
    paths["csv"].write_text(as_csv(rows))
    drawn = save_svg(rows, paths["svg"])
    return [path for suffix, path in paths.items() if drawn or suffix != "svg"]
