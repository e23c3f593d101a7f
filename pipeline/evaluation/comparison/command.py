"""`headrace eval MODEL --data TOKENS`, and of several models side by side: `headrace eval --model a=F --model b=F`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from foundation.directory import write_text
from foundation.errors import ConfigError
from foundation.paths import FOLDER, OUTPUT
from foundation.section import parse
from pipeline.evaluation.comparison.candidates import Wanted, check
from pipeline.evaluation.comparison.frontier import measure_all
from pipeline.evaluation.comparison.rows import Row, as_csv, as_json
from pipeline.evaluation.comparison.size_quality import save_svg
from pipeline.evaluation.comparison.table import comparison_tables
from pipeline.evaluation.consumers.consumer import CONSUMERS
from pipeline.evaluation.heldout import command, harness
from pipeline.evaluation.heldout.data import HeldOutData
from pipeline.evaluation.tasks import command as tasks_command

TABLE_WIDTH = 120
"""Width of tables in characters: rich drops columns in a narrower terminal."""

_FOR_SEVERAL = ("consumers", "batches", "positions", "prompt", "csv", "picture")
_OF_THE_LOSS = ("data", "mask_documents", "max_tokens", *_FOR_SEVERAL)
_OF_TASKS = ("task_folder", "shots", "limit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    command.add_arguments(parser, optional=True)
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        type=FOLDER.after_name(),
        help="a model of a comparison and its name (repeatable; the first is the reference of KL and top-1 agreement):"
        " a Hugging Face folder, or a directory with model.gguf",
    )
    add_comparison_arguments(parser)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a text that every model continues")
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="new tokens for each prompt; default: %(default)s"
    )
    parser.add_argument("--csv", metavar="OUT.csv", type=OUTPUT, help="write the figures as CSV, too")
    parser.add_argument(
        "--picture", metavar="OUT.svg", type=OUTPUT, help="draw size against quality, with the Pareto frontier"
    )
    harness.add_arguments(parser)


def add_comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the measurements beside the loss."""
    wanted = Wanted()
    parser.add_argument(
        "--consumers",
        metavar="NAME,NAME",
        help=f"which programs serve the models ({', '.join(CONSUMERS)}); default: transformers for folders, llama.cpp"
        " for GGUF files",
    )
    batches = ",".join(map(str, wanted.batches))
    parser.add_argument(
        "--batches", metavar="B,B", help=f"batch sizes to time generation with, 0 for none; default: {batches}"
    )
    text = f"compare the distributions of at most N positions; default: {wanted.positions}"
    parser.add_argument("--positions", type=int, metavar="N", help=text)


def run(args: argparse.Namespace) -> int:
    """Evaluates one model, several side by side, or tasks.

    Raises:
        ConfigError, DataError: an unusable input, before any work; DataError also when a consumer fails.
    """
    if args.model and args.models:
        raise ConfigError("MODEL", args.model, why="--model is given, too", remedy=f"write --model name={args.model}")
    if not args.model and not args.models:
        remedy = "give MODEL, or --model NAME=FOLDER for each of several"
        raise ConfigError("MODEL", why="there is nothing to evaluate", remedy=remedy)
    models = named_paths("--model", args.models)
    _check_flags(args)
    if args.tasks is not None:
        return tasks_command.run(args, models or {Path(args.model).name: Path(args.model)})
    if args.data is None:
        raise ConfigError("--data", why="the loss is of held-out tokens", remedy="give --data TOKENS, or --tasks NAMES")
    if args.model:
        for flag in _FOR_SEVERAL:
            if getattr(args, flag) is not None:
                why = "it is for models side by side"
                raise ConfigError(f"--{flag}", getattr(args, flag), why=why, remedy=f"write --model name={args.model}")
        return command.run(args)
    return _compare(args, models)


def _check_flags(args: argparse.Namespace) -> None:
    """Refuses a flag that would have no effect."""
    given, instead = (_OF_TASKS, "a loss") if args.tasks is None else (_OF_THE_LOSS, "tasks")
    for name in given:
        if getattr(args, name) is not None:
            flag, why = f"--{name.replace('_', '-')}", f"it has no effect on {instead}"
            remedy = "leave it out" if args.tasks is not None else "give --tasks NAMES, or leave it out"
            raise ConfigError(flag, str(getattr(args, name)), why=why, remedy=remedy)


def _compare(args: argparse.Namespace, models: dict[str, Path]) -> int:
    for out in filter(None, (args.csv, args.picture)):
        check_writable(Path(out))
    numbers = {"batch_size": args.batch_size, "max_tokens": args.max_tokens, "split": args.split}
    data = parse(HeldOutData, {"path": args.data, **command.window_fields(args), **numbers}, at="data")
    wanted = wanted_of(args, prompts=args.prompt or ())
    checked = check(models, data=data, consumers=consumers_of(args), wanted=wanted)
    console = Console(stderr=True)
    rows = measure_all(checked, say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    if args.csv:
        write_text(Path(args.csv), as_csv(rows))
    if args.picture and not save_svg(rows, Path(args.picture)):
        console.print(f"{args.picture} was not written: fewer than two models were measured", markup=False)
    if args.json:
        print(as_json(rows))
    else:
        _print(rows, wanted.prompts)
    return 0


def _print(rows: list[Row], prompts: Iterable[str]) -> None:
    output = Console(width=max(Console().width, TABLE_WIDTH))
    for table in comparison_tables(rows):
        output.print(table)
    for number, prompt in enumerate(prompts):
        output.print(f"\n{prompt!r} is continued by greedy decoding:", markup=False, highlight=False)
        for row in rows:
            if row.samples:
                output.print(f"\n[{row.label}]\n{row.samples[number]}", markup=False, highlight=False)


def consumers_of(args: argparse.Namespace) -> tuple[str, ...] | None:
    """The names of --consumers."""
    return tuple(args.consumers.split(",")) if args.consumers else None


def wanted_of(args: argparse.Namespace, *, prompts: Iterable[str]) -> Wanted:
    """The measurements that the options of `add_comparison_arguments` ask for.

    Raises:
        ConfigError: --batches is not a list of numbers.
    """
    usual = Wanted()
    positions = usual.positions if args.positions is None else args.positions
    batches = usual.batches if args.batches is None else _batches(args.batches)
    return Wanted(positions=positions, batches=batches, prompts=tuple(prompts), sample_tokens=args.tokens)


def _batches(text: str) -> tuple[int, ...]:
    try:
        given = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        why = "it is no list of whole numbers"
        raise ConfigError("--batches", text, why=why, remedy="use 1,8, or 0 for none") from None
    return () if given == (0,) else given


def named_paths(flag: str, given: Iterable[str]) -> dict[str, Path]:
    """NAME=PATH arguments by name.

    Raises:
        ConfigError: an argument has another form, or a name is given twice.
    """
    paths: dict[str, Path] = {}
    for text in given:
        name, _, path = text.partition("=")
        name = name.strip()
        if not name or not path:
            raise ConfigError(flag, text, why="it must be NAME=DIRECTORY", remedy=f"write {flag} small={path or text}")
        if name in paths:
            why = f"{paths[name]} already has that name"
            raise ConfigError(flag, text, why=why, remedy=f"write {flag} {name}-2={path}")
        paths[name] = Path(path)
    return paths


def check_writable(out: Path, *, name: str = "OUT") -> Path:
    """Returns the path of the output file, after a check that it is writable.

    Raises:
        ConfigError: it is a directory, or its directory is missing or not writable.
    """
    folder = out.parent
    if out.is_dir():
        raise ConfigError(name, str(out), why="it is a directory", remedy=f"use {out / 'report.html'}")
    if not folder.is_dir():
        raise ConfigError(name, str(out), why=f"{folder} is not a directory", remedy=f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(name, str(out), why=f"{folder} is not writable", remedy="choose another directory")
    return out
