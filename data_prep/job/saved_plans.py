"""Plans of phases that all shares of a job array read: only one share makes each plan.

    phases/NAME-HASH.json    the facts of a phase (see `planning.py`), what they depend on, and a checksum
    phases/lock              held exclusively by the share that plans

A plan reads the marker of every task of earlier phases: without a saved plan, shares x tasks files on a shared file
system. A saved plan is used if it was made with this config and version (HASH), and if no directory into which earlier
phases write has changed since (time of modification), e.g. because a task was removed to be repeated. A process with
the job's exclusive lock makes its own plans, and removes the saved ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from data_prep.job.directory import FORMAT, Job
from data_prep.job.planning import Facts
from data_prep.task import with_checksum, without_checksum
from foundation.directory import fingerprint_of, write_json
from foundation.lock import LockedError, lock_file
from foundation.version import __version__

_WAIT_S = 600.0
"""Longest wait for the share that plans, in seconds: it may be frozen, and a second plan is equal to its plan."""


def saved_facts(job: Job, name: str, facts: Callable[[Job], Facts], *, inputs: Sequence[Path]) -> Facts:
    """Loads the facts of a phase from its saved plan, or reads and saves them for all shares.

    Args:
        name: name of the phase.
        facts: function that reads the facts from the job directory.
        inputs: directories into which earlier phases write, but this phase does not.

    Raises:
        DataError: an earlier phase has not finished; nothing is saved.
    """
    path = _path(job, name)
    if (found := _read(path, inputs)) is not None:
        return found
    with suppress(OSError):  # if this fails, the plan is not saved
        path.parent.mkdir(exist_ok=True)
    with _planning(path.parent):
        if (found := _read(path, inputs)) is not None:
            return found
        made = facts(job)
        with suppress(OSError):
            write_json(path, with_checksum({"facts": made, "inputs": _times(inputs)}))
    return made


def drop_plans(job: Job, names: Sequence[str]) -> None:
    """Removes the saved plans of the phases after a phase with unfinished tasks."""
    for name in names:
        with suppress(OSError):
            _path(job, name).unlink()


def drop_all_plans(job: Job) -> None:
    """Removes all saved plans. Needs the exclusive lock."""
    shutil.rmtree(job.plans, ignore_errors=True)


def _path(job: Job, name: str) -> Path:
    made_with = [__version__, FORMAT, job.config.model_dump(mode="json")]
    return job.plans / f"{name}-{fingerprint_of(made_with)[:16]}.json"


def _read(path: Path, inputs: Sequence[Path]) -> Facts | None:
    """Reads the facts of a saved plan; None unless it is intact and matches the present inputs."""
    try:
        saved = without_checksum(json.loads(path.read_bytes()))
        facts: Facts | None = saved["facts"] if saved["inputs"] == _times(inputs) else None
    except (OSError, ValueError, KeyError):
        return None
    return facts


def _times(inputs: Sequence[Path]) -> dict[str, Any]:
    return {path.name: path.stat().st_mtime_ns for path in inputs if path.is_dir()}


@contextmanager
def _planning(directory: Path) -> Iterator[None]:
    """Holds the lock of the plans within the block; continues without it after `_WAIT_S` or an `OSError`."""
    with ExitStack() as stack:
        with suppress(OSError, LockedError):
            stack.enter_context(lock_file(directory / "lock", doing="planning", timeout_s=_WAIT_S))
        yield
