"""Results of a recipe: all its models side by side, as tables, a page, a picture and files. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from headrace.base.directory import write_text
from pipeline.checkpoint.export.find import is_checkpoint
from pipeline.compress.recipe.steps import ORIGINAL, Recipe, is_folder
from pipeline.evaluation.comparison.candidates import Wanted, check
from pipeline.evaluation.comparison.command import TABLE_WIDTH
from pipeline.evaluation.comparison.frontier import measure_all
from pipeline.evaluation.comparison.rows import Row, as_csv, as_json
from pipeline.evaluation.comparison.size_quality import save_svg
from pipeline.evaluation.comparison.table import comparison_tables
from pipeline.evaluation.report.inputs import Inputs
from pipeline.evaluation.report.runs import RunRecord, read_run
from pipeline.evaluation.report.scope import scope

NAME, PAGE = "frontier", "report.html"
"""File names of the results: NAME.json, NAME.csv, NAME.svg, and the page."""


def write_results(recipe: Recipe) -> list[Row]:
    """Evaluates the existing models, prints the tables and writes the files.

    KL divergences are relative to the first one, the floating-point model that was quantized.

    Raises:
        DataError: a consumer fails.
    """
    models = {name: folder for name, folder in recipe.models.items() if folder.is_dir()}
    told, shown = Console(stderr=True), Console(width=max(Console().width, TABLE_WIDTH))

    def say(line: str) -> None:
        told.print(line, markup=False, highlight=False, soft_wrap=True)

    say("\n== Evaluate: all models side by side")
    wanted = Wanted(prompts=tuple(recipe.config.prompts))
    comparison = check(models, data=recipe.config.data, wanted=wanted)
    rows = measure_all(comparison, say=say)
    inputs = Inputs(recipe.output / PAGE, tuple(_runs(recipe)), comparison)
    written = _write(rows, inputs)
    for table in comparison_tables(rows, title=f"{recipe.config.model}, compressed"):
        shown.print(table)
    lines = [f"{name}: not accepted; the message of its step is above" for name in recipe.models.keys() - models.keys()]
    for line in (f"scored: {scope(rows, comparison.data)}", *lines, f"wrote {', '.join(map(str, written))}"):
        shown.print(line, markup=False, highlight=False, soft_wrap=True)
    return rows


def _runs(recipe: Recipe) -> list[RunRecord]:
    """Records of the training runs: the original's, if it is a run, and every distillation's."""
    given = Path(recipe.config.model)
    run = given.resolve().parent.parent if is_checkpoint(given) else given
    paths = {} if is_folder(given) else {ORIGINAL: run}
    paths |= {step.name: step.output for step in recipe.steps if step.verb == "distill"}
    return [read_run(name, path) for name, path in paths.items() if path.is_dir()]


def _write(rows: Sequence[Row], inputs: Inputs) -> list[Path]:
    """Writes the files, and returns their paths."""
    from pipeline.evaluation.report.page import page  # noqa: PLC0415  (matplotlib takes a second to import)

    texts = {inputs.out: page(inputs, rows)}
    texts |= {inputs.out.with_name(f"{NAME}.json"): as_json(rows), inputs.out.with_name(f"{NAME}.csv"): as_csv(rows)}
    for path, text in texts.items():
        write_text(path, text)
    picture = inputs.out.with_name(f"{NAME}.svg")
    return [*texts, picture] if save_svg(rows, picture) else list(texts)
