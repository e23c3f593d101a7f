"""Checks the report's command line before any work is done. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace.base.errors import ConfigError, DataError
from headrace.base.section import parse
from pipeline.evaluation.command import window_fields
from pipeline.evaluation.data import FieldNames, HeldOutData, as_trained, open_heldout
from pipeline.evaluation.model_folder import ModelFolder
from pipeline.report.runs import RunRecord, read_run

T = TypeVar("T")


@dataclass(frozen=True)
class Model:
    """A model folder and its name in the report."""

    name: str
    folder: ModelFolder


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a report.

    Attributes:
        out: the page to write; its directory exists.
        runs: read, finished or still training, names distinct.
        models: opened, with the dataset's tokenizer, names distinct.
        data: the held-out split they are evaluated on; None without models.
        prompt: text for the last model to complete, or None.
        tokens: maximum number of new tokens.
    """

    out: Path
    runs: tuple[RunRecord, ...]
    models: tuple[Model, ...]
    data: HeldOutData | None
    prompt: str | None
    tokens: int


def check(args: argparse.Namespace) -> Inputs:
    """Opens and checks every input.

    Raises:
        ConfigError: OUT cannot be written, a name is missing or given twice, or a number or the prompt is unusable.
        DataError: a run, a model or the tokens directory is missing, damaged or of the wrong kind.
    """
    out = _check_out(Path(args.out))
    _check_completion(args.prompt, args.tokens)
    data = _check_data(args)
    runs = _named("--run", args.run, read_run)
    models = _named("--model", args.model, lambda name, path: Model(name, ModelFolder.open(path)))
    if models:
        assert data is not None
        data = as_trained(data, models[0].folder.path)  # one set of windows for all of them
    for model in models:
        assert data is not None
        open_heldout(data, model.folder, names=FieldNames("--data", "--sequence-length"))
    if args.prompt is not None:
        _check_tokenizer(models[-1])
    return Inputs(out, runs, models, data, args.prompt, args.tokens)


def _check_data(args: argparse.Namespace) -> HeldOutData | None:
    """The held-out split; None for a report of runs alone."""
    if not args.run and not args.model:
        why = "there is nothing to report"
        raise ConfigError("--run", why=why, remedy="give --run NAME=RUN_DIR, or --model NAME=FOLDER with --data TOKENS")
    if args.model and args.data is None:
        why = "models are evaluated on the held-out split of a tokens directory"
        raise ConfigError("--data", why=why, remedy="give --data TOKENS, or leave --model out for the runs alone")
    needless = {"--data": args.data, "--max-tokens": args.max_tokens, "--prompt": args.prompt}
    if not args.model:
        for flag, value in needless.items():
            if value is not None:
                raise ConfigError(flag, value, why="it is for models, and there is no --model", remedy="leave it out")
        return None
    numbers = {**window_fields(args), "max_tokens": args.max_tokens}
    return parse(HeldOutData, {"path": args.data, **numbers}, at="data")


def _check_out(out: Path) -> Path:
    folder = out.parent
    if out.is_dir():
        raise ConfigError("OUT.html", str(out), why="it is a directory", remedy=f"use {out / 'report.html'}")
    if not folder.is_dir():
        raise ConfigError("OUT.html", str(out), why=f"{folder} is not a directory", remedy=f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("OUT.html", str(out), why=f"{folder} is not writable", remedy="choose another directory")
    return out


def _check_completion(prompt: str | None, tokens: int) -> None:
    if prompt == "":
        why = "generation needs at least one token"
        raise ConfigError("--prompt", prompt, why=why, remedy="give some text, or leave --prompt out")
    if tokens < 1:
        raise ConfigError("--tokens", tokens, why="it is not 1 or more", remedy="use 1 or more")


def _check_tokenizer(model: Model) -> None:
    path = model.folder.path
    if not (path / "tokenizer_config.json").is_file():
        why = f"{path} has no tokenizer_config.json, which --prompt needs"
        raise DataError(f"{why}\n  try: export the model again, with its tokenizer, or leave --prompt out")


def _named(flag: str, given: Iterable[str], make: Callable[[str, Path], T]) -> tuple[T, ...]:
    """Splits NAME=PATH arguments, refuses repeated names, and opens each path after all names are checked."""
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
    return tuple(make(name, path) for name, path in paths.items())
