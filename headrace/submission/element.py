"""Prints the arguments of one job array element for `slurm/sweep.sh`, one per line, the config first.

    python -m headrace.submission.element CONFIG [--set KEY=VALUE ...] [--sweep KEY=VALUE,VALUE ...]

Elements that shared a run directory would train one run, each waiting for the other's lock.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from foundation.cli import guarded
from foundation.configfile import load
from foundation.errors import ConfigError
from headrace.submission.configs import elements


def arguments_of(words: Sequence[str], *, number: int | None) -> list[str]:
    """The config and the overrides of an element, its run directory last.

    Args:
        words: arguments of `slurm/train.sbatch`.
        number: number of the element; None outside of a job array.

    Raises:
        ConfigError: the element does not exist, or the config has no run.dir.
    """
    parser = argparse.ArgumentParser(prog="slurm/train.sbatch", allow_abbrev=False)
    parser.add_argument("config")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--sweep", action="append", default=[])
    given = parser.parse_args(words)
    run = load(given.config, given.overrides).get("run")
    run_dir = run.get("dir") if isinstance(run, dict) else None
    if not isinstance(run_dir, str):
        raise ConfigError("run.dir", run_dir, why="a job has to know where to write", remedy='"run": {"dir": "..."}')
    points = elements(Path(run_dir), given.sweep) if given.sweep else []
    if points and (number is None or number >= len(points)):
        shown, why = number, f"the sweep has {len(points)} elements"
        raise ConfigError("--array", shown, why=why, remedy=f"sbatch --array=0-{len(points) - 1} ...")
    own = points[number].overrides if points and number is not None else [f"run.dir={run_dir}/element-{number}"]
    return [given.config, *(word for text in [*given.overrides, *own] for word in ("--set", text))]


def main() -> None:
    """Prints the arguments."""
    number = os.environ.get("SLURM_ARRAY_TASK_ID")
    print("\n".join(arguments_of(sys.argv[1:], number=None if number is None else int(number))))


if __name__ == "__main__":
    sys.exit(guarded(main))
