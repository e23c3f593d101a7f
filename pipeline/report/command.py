"""`python -m pipeline report OUT.html --run NAME=RUN --model NAME=FOLDER --data TOKENS`: report of runs and models.

Runs alone need neither a model nor data, and may still be training: the page is of the steps they have done.

All inputs are checked first; then each model is evaluated in a subprocess, a table is printed, and the page is written
atomically.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from pipeline.evaluation.command import add_window_arguments
from pipeline.evaluation.complete import complete
from pipeline.report.inputs import Inputs, Model, check
from pipeline.report.models import TABLE_WIDTH, Measured, measure_model, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments; those of the evaluation have the defaults of `HeldOutData`."""
    parser.add_argument("out", metavar="OUT.html", help="HTML file to write; an existing one is replaced")
    _add_named(
        parser,
        "--run",
        "RUN_DIR",
        "a run directory, finished or training, and its name (repeatable)",
    )
    _add_named(parser, "--model", "FOLDER", "a Hugging Face model folder and its name (repeatable)")
    parser.add_argument("--data", metavar="TOKENS", help="a tokens directory, for its held-out split")
    add_window_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="evaluate about N tokens, evenly spaced; default: all"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="show the last model's completion of this text")
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="maximum number of new tokens; default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Checks the inputs, evaluates the models, prints the table, writes the page.

    Raises:
        ConfigError, DataError: as `check`, before any work; DataError when a model cannot be evaluated.
    """
    inputs = check(args)
    progress, output = Console(stderr=True), Console(width=max(Console().width, TABLE_WIDTH))
    measured = _measure_all(inputs, progress)
    if inputs.data is not None:
        output.print(table(measured, inputs.data))
    completion = None
    if inputs.prompt is not None:
        last = inputs.models[-1]
        progress.print(f"completing the prompt with {last.name}", markup=False, highlight=False)
        completion = complete(last.folder.path, inputs.prompt, tokens=inputs.tokens)
        print(f"\ncompletion by {last.name}:\n\n{completion}\n", flush=True)
    from pipeline.report.page import page  # noqa: PLC0415  (matplotlib takes a second to import)

    write_atomically(inputs.out, page(inputs, measured, completion))
    print(f"wrote {inputs.out}")
    return 0


def write_atomically(out: Path, text: str) -> None:
    """Writes UTF-8 text atomically: to a temporary file beside `out`, which is then renamed."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def _add_named(parser: argparse.ArgumentParser, flag: str, what: str, text: str) -> None:
    parser.add_argument(flag, action="append", default=[], metavar=f"NAME={what}", help=text)


def _measure_all(inputs: Inputs, console: Console) -> list[Measured]:
    """Evaluates the models one after the other; prints a line before each."""

    def measure_one(number: int, model: Model) -> Measured:
        line = f"evaluating {number}/{len(inputs.models)}: {model.name} ({model.folder.path})"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        assert inputs.data is not None
        return measure_model(model, inputs.data)

    return [measure_one(i, model) for i, model in enumerate(inputs.models, start=1)]
