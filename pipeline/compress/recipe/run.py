"""Runs a recipe: every step is a command that a user could type, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from rich.console import Console

from headrace.base.directory import write_json
from headrace.base.errors import EXIT_USAGE
from headrace.base.lock import lock_file
from headrace.base.processes import die_with_parent, signals_passed_on
from pipeline.compress.recipe.check import check_recipe, check_steps
from pipeline.compress.recipe.config import RecipeConfig
from pipeline.compress.recipe.results import write_results
from pipeline.compress.recipe.steps import CONFIGS, Recipe, Step, plan_steps

LOCK = ".lock"


def run_recipe(config: RecipeConfig) -> int:
    """Runs the steps that have not been done, then evaluates all models side by side.

    If consumers do not accept a quantization, the others are still made.

    Returns:
        0, or the exit code of the step that failed, at which a second start resumes.

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
    first = int(recipe.steps[0].verb == "export")  # a run is exported before the check, to be checked as a folder
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
    # a step that outlived a killed recipe would write beside the same step of the next start
    with subprocess.Popen(command, preexec_fn=die_with_parent) as process, signals_passed_on([process]):  # noqa: PLW1509
        code = process.wait()
    return 128 - code if code < 0 else code


def _say(line: str) -> None:
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
