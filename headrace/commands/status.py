"""`headrace status [RUN]`: the progress of a run or a data-prep job, from any terminal, without affecting it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from foundation import configfile
from foundation.directory import kind_of
from pipeline.cluster.status import command

add_arguments = command.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Shows a data-prep job; any other path is a run of the trainer."""
    given = arguments.run or arguments.config
    lines = None if given is None else data_prep_lines(Path(given), arguments.overrides)
    if lines is None:
        return command.run(arguments)
    print(json.dumps({"data_prep": lines}) if arguments.json else "\n".join(lines))
    return 0


def data_prep_lines(path: Path, overrides: Sequence[str] = ()) -> list[str] | None:
    """The phases of a data-prep job, given its config, its directory or its output; None for any other path.

    Raises:
        DataError: the job has not begun, or its files are damaged.
        ConfigError: the config cannot be read.
    """
    if _is_job(path) or _is_job(path.absolute().parent / f".{path.name}.job") or kind_of(path) == "tokens":
        from data_prep.job.status import report_of  # noqa: PLC0415

        return report_of(path.absolute())
    if path.is_dir():
        return None
    if path.suffix not in configfile.SUFFIXES or not configfile.load(path, overrides).keys() >= {"output", "sources"}:
        return None
    from data_prep.config.corpus import load  # noqa: PLC0415
    from data_prep.job.status import report  # noqa: PLC0415

    return report(load(str(path), list(overrides)))


def _is_job(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".job") and path.is_dir()
