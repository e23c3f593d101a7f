"""`python -m pipeline report OUT.html --run NAME=RUN --model NAME=FOLDER --data TOKENS`: runs and models on one page.

Everything given is checked first; then each model is measured in a process of its own, a table is printed, and the
page is written whole or not at all.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from pipeline.evaluation.complete import complete
from pipeline.evaluation.data import HeldOutData
from pipeline.report.inputs import Inputs, Model, check
from pipeline.report.models import TABLE_WIDTH, Measured, measure_model, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments; those of the evaluation have the defaults of `HeldOutData`."""
    length = HeldOutData(path="").sequence_length
    parser.add_argument("out", metavar="OUT.html", help="the page to write; replaced when it exists")
    _add_named(parser, "--run", "RUN_DIR", "a run directory and the name it gets on the page (repeatable)")
    _add_named(parser, "--model", "FOLDER", "a Hugging Face model folder and its name (repeatable)")
    parser.add_argument("--data", required=True, metavar="TOKENS", help="a tokens directory, for its held-out split")
    parser.add_argument("--sequence-length", type=int, default=length, metavar="T", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="about so many tokens, spread evenly; default: all")
    parser.add_argument("--prompt", metavar="TEXT", help="show what the last model makes of this text")
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="tokens to add to the prompt at most; default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Checks, measures, prints, writes.

    Raises:
        ConfigError, DataError: as `check`, before any work; DataError when a model cannot be evaluated.
    """
    inputs = check(args)
    said, shown = Console(stderr=True), Console(width=max(Console().width, TABLE_WIDTH))
    measured = _measure_all(inputs, said)
    shown.print(table(measured, inputs.data))
    completion = None
    if inputs.prompt is not None:
        last = inputs.models[-1]
        said.print(f"completing the prompt with {last.name}", markup=False, highlight=False)
        completion = complete(last.folder.path, inputs.prompt, tokens=inputs.tokens)
        print(f"\n{last.name} goes on from the prompt:\n\n{completion}\n", flush=True)
    from pipeline.report.page import page  # noqa: PLC0415  (matplotlib: not worth waiting for in a refusal)

    write_whole(inputs.out, page(inputs, measured, completion))
    print(f"wrote {inputs.out}")
    return 0


def write_whole(out: Path, text: str) -> None:
    """Writes UTF-8 text under a temporary name beside `out` and renames it, so that a reader never sees half of it."""
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
    parser.add_argument(flag, action="append", required=True, metavar=f"NAME={what}", help=text)


def _measure_all(inputs: Inputs, console: Console) -> list[Measured]:
    """One line per model before its evaluation starts; the evaluation shows its own bar on a terminal."""

    def measure_one(number: int, model: Model) -> Measured:
        line = f"evaluating {number}/{len(inputs.models)}: {model.name} ({model.folder.path})"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        return measure_model(model, inputs.data)

    return [measure_one(i, model) for i, model in enumerate(inputs.models, start=1)]
