"""The directory of a submission: the code, configs and scripts of its jobs, as submitted.

    RUN/submissions/1/
        submission.json     the command, the site, the version of the code, the time of submission, the jobs
        code/               the packages and job scripts of a clone; of an installed package the version is in the JSON
        modules/            the user's modules in the working directory whose functions training configs name
        configs/NAME.json   the config of each stage, with all files that it extends and all overrides
        NAME.sbatch         the script of each stage; `sbatch NAME.sbatch` submits it again
        logs/               the output of the jobs

Later edits of the clone or the configs do not affect a job that waits in the queue.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundation.directory import COPIED_FROM, code_version, write_json, write_text
from foundation.errors import DataError
from foundation.user_function import modules_here
from foundation.version import __version__
from headrace.submission.configs import Given
from pipeline.runtime.metrics.times import iso_time

PACKAGES = ("headrace", "foundation", "data_prep", "pipeline", "slurm", "ds_configs", "demo")
"""Folders of a clone that are copied; headrace/share has links to the last two."""
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "submissions", "*.submissions")
"""Not copied; of a run in a folder of the clone, such as demo/, submissions are not copied into themselves."""
MODULES = "modules"
CLONE = Path(__file__).resolve().parents[2]


def is_clone() -> bool:
    """Whether the running code is in a clone rather than installed."""
    return (CLONE / "slurm" / "env.sh").is_file()


def directory_of(configs: list[Given]) -> Path:
    """The directory of a new submission: in the first run's directory, else beside the first output."""
    first = next((each for each in configs if each.kind == "run"), configs[0])
    made = first.makes.absolute()
    # other stages rename their complete output to this name
    parent = made / "submissions" if first.kind == "run" else made.parent / f"{made.name}.submissions"
    taken = [int(path.name) for path in parent.glob("*") if path.name.isdigit()]
    return parent / str(max(taken, default=0) + 1)


def copy_code(directory: Path) -> Path | None:
    """Copies the code of a clone; returns the copy, or None if the code is installed."""
    if not is_clone():
        return None
    code = directory / "code"
    for name in PACKAGES:
        if (CLONE / name).is_dir():
            shutil.copytree(CLONE / name, code / name, symlinks=True, ignore=IGNORED)
    write_text(code / COPIED_FROM, code_version()["commit"] or "")  # manifests continue to name it
    return code


def copy_modules(directory: Path, config: Mapping[str, Any]) -> None:
    """Copies the user's modules in the working directory that a training config names to `modules/`."""
    (directory / MODULES).mkdir(exist_ok=True)
    for path in modules_here(config):
        if path.is_dir():
            shutil.copytree(path, directory / MODULES / path.name, ignore=IGNORED, dirs_exist_ok=True)
        else:
            shutil.copy(path, directory / MODULES)


def make(directory: Path) -> list[Path]:
    """Makes the directory of a submission; returns it and its newly made parents, for `remove`.

    Raises:
        DataError: another submission has meanwhile taken its number.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir()
    except FileExistsError:
        why = f"{directory} has been made meanwhile, by another submission"
        raise DataError(f"{why}\n  try: squeue shows its jobs; submit again when they have ended") from None
    return made


def remove(made: Sequence[Path]) -> None:
    """Removes a failed submission, and the parent directories that were made for it.

    Args:
        made: directories that `make` returned.
    """
    directory, *above = made
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):  # not empty: another process has written there meanwhile
        for path in above:
            path.rmdir()


def save_config(directory: Path, name: str, raw: Mapping[str, Any]) -> Path:
    """Writes the config of a stage; returns its path."""
    path = directory / "configs" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dict(raw))
    return path


def record(directory: Path, **entries: Any) -> None:
    """Writes submission.json."""
    made = {"headrace": __version__, "code": code_version(), "submitted": iso_time(time.time())}
    write_json(directory / "submission.json", {**made, **entries})
