"""`python -m pipeline report OUT.html --run NAME=RUN --model NAME=FOLDER --data TOKENS`: report of runs and models.

Runs alone need neither a model nor data, and may still be training: the page shows their steps so far.

All inputs are checked first; then each model is measured in processes of its own, tables are printed, and the page is
written atomically.
"""

from __future__ import annotations

import argparse

from rich.console import Console

from foundation.directory import write_text
from foundation.paths import FOLDER, OUTPUT, PLACE, RUN, PathArgument
from pipeline.evaluation.comparison.command import TABLE_WIDTH, add_comparison_arguments
from pipeline.evaluation.comparison.frontier import measure_all
from pipeline.evaluation.comparison.table import comparison_tables
from pipeline.evaluation.heldout.command import add_window_arguments
from pipeline.evaluation.report.inputs import check
from pipeline.evaluation.report.scope import scope


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments; the evaluation's have the defaults of `HeldOutData`."""
    parser.add_argument("out", metavar="OUT.html", type=OUTPUT, help="HTML file to write; an existing one is replaced")
    _add_named(
        parser,
        "--run",
        "RUN_DIR",
        RUN,
        "a run directory, finished or training, and its name (repeatable)",
    )
    text = "a Hugging Face model folder or a directory with model.gguf, and its name (repeatable); KL is to the first"
    _add_named(parser, "--model", "FOLDER", FOLDER, text)
    parser.add_argument("--data", metavar="TOKENS", type=PLACE, help="a tokens directory, for its held-out split")
    add_window_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="evaluate about N tokens, evenly spaced; default: all"
    )
    add_comparison_arguments(parser)
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="show every model's continuation of this text (repeatable)"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="new tokens for each prompt; default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Checks the inputs, measures the models, prints the tables, writes the page.

    Raises:
        ConfigError, DataError: an unusable input, before any work; DataError also when a model cannot be evaluated.
    """
    inputs = check(args)
    progress, output = Console(stderr=True), Console(width=max(Console().width, TABLE_WIDTH))

    def say(line: str) -> None:
        progress.print(line, markup=False, highlight=False, soft_wrap=True)

    rows = [] if inputs.comparison is None else measure_all(inputs.comparison, say=say)
    if inputs.comparison is not None:
        for table in comparison_tables(rows):
            output.print(table)
        output.print(f"scored: {scope(rows, inputs.comparison.data)}", markup=False, highlight=False, soft_wrap=True)
    from pipeline.evaluation.report.page import page  # noqa: PLC0415  (matplotlib takes a second to import)

    write_text(inputs.out, page(inputs, rows))
    print(f"wrote {inputs.out}")
    return 0


def _add_named(parser: argparse.ArgumentParser, flag: str, metavar: str, path: PathArgument, text: str) -> None:
    parser.add_argument(flag, action="append", default=[], metavar=f"NAME={metavar}", type=path.after_name(), help=text)
