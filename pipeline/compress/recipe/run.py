"""Runs a recipe: every step is a command that a user could type, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from foundation.directory import write_json, write_text
from foundation.errors import EXIT_USAGE
from foundation.lock import lock_file
from foundation.processes import die_with_parent, signals_passed_on
from pipeline.checkpoint.export.find import is_checkpoint
from pipeline.compress.recipe.check import check_recipe, check_steps
from pipeline.compress.recipe.config import RecipeConfig
from pipeline.compress.recipe.steps import CONFIGS, ORIGINAL, Recipe, Step, is_folder, plan_steps
from pipeline.evaluation.comparison.candidates import Wanted, check
from pipeline.evaluation.comparison.command import TABLE_WIDTH
from pipeline.evaluation.comparison.frontier import measure_all
from pipeline.evaluation.comparison.rows import Row, as_csv, as_json
from pipeline.evaluation.comparison.size_quality import save_svg
from pipeline.evaluation.comparison.table import comparison_tables
from pipeline.evaluation.report.inputs import Inputs
from pipeline.evaluation.report.runs import RunRecord, read_run
from pipeline.evaluation.report.scope import scope

LOCK = ".lock"
NAME, PAGE = "frontier", "report.html"
"""File names of the results: NAME.json, NAME.csv, NAME.svg, and the page."""


def run_recipe(config: RecipeConfig) -> int:
    """Runs the steps that have not been done, then evaluates all models side by side.

    If consumers refuse a quantization, the other quantizations are still made.

    Returns:
        0, or the exit code of the step that failed; a second start resumes there.

    Raises:
        ConfigError, DataError: the recipe is refused, or another process works in its output.
    """
    check_recipe(config)
    recipe = plan_steps(config)
    recipe.output.mkdir(parents=True, exist_ok=True)
    with lock_file(recipe.output / LOCK, doing=f"compressing in {recipe.output}"):
        return _run_steps(recipe)


def _run_steps(recipe: Recipe) -> int:
    refused = 0
    first = int(recipe.steps[0].verb == "export")  # a run is exported before the check, which checks a folder
    for number, step in enumerate(recipe.steps):
        if number == first:
            check_steps(recipe)
        code = _do(recipe, step)
        if code == EXIT_USAGE and step.verb == "quantize":
            refused = code
        elif code:
            _say(f"step '{step.name}' ended with exit code {code}; the same command goes on with it")
            return code
    write_results(recipe)
    return refused


def _do(recipe: Recipe, step: Step) -> int:
    """Runs a step unless it has been done; returns its exit code."""
    if step.done:
        _say(f"{step.title} (done before: {step.result})")
        return 0
    return _run(recipe, step)


def _run(recipe: Recipe, step: Step) -> int:
    """Runs one step in a process of its own; returns its exit code."""
    configs = recipe.output / CONFIGS
    if step.config:
        configs.mkdir(exist_ok=True)
        write_json(configs / f"{step.name}.json", dict(step.config))
    words = step.command(configs)
    _say(f"\n== {step.title}\n$ headrace {' '.join(words)}")
    command = [sys.executable, "-P", "-m", "pipeline", *words]
    # a step that outlived a killed recipe would write beside its own restart
    with subprocess.Popen(command, preexec_fn=die_with_parent) as process, signals_passed_on([process]):  # noqa: PLW1509
        code = process.wait()
    return 128 - code if code < 0 else code


def _say(line: str) -> None:
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


def write_results(recipe: Recipe) -> list[Row]:
    """Evaluates the existing models, prints the tables and writes the files.

    KL divergences are relative to the first model, the floating-point model that was quantized.

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
