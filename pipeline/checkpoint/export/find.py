"""Finds checkpoints by a path from the command line: a run directory, one checkpoint, or `latest`."""

from __future__ import annotations

from pathlib import Path

from headrace.base.errors import CheckpointError
from headrace.base.foreign_folders import what_it_is
from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.checkpoint.format.naming import LATEST, step_of
from pipeline.checkpoint.store import CheckpointStore


def is_checkpoint(path: Path) -> bool:
    """Whether a path names one checkpoint rather than a run."""
    return path.name == LATEST or step_of(path.name) is not None


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """The checkpoints of a run directory, newest first, or the one checkpoint at `path`.

    Raises:
        CheckpointError: there is none.
    """
    if is_checkpoint(path):
        path = path.resolve() if path.name == LATEST else path
        step = step_of(path.name)
        if step is None or not path.is_dir():
            raise _not_found(path)
        return [Checkpoint(path, step)]
    found = CheckpointStore(path, keep=1).checkpoints()
    if not found:
        raise _not_found(path)
    return found


def find_checkpoint(path: Path) -> Checkpoint:
    """The newest of `find_checkpoints`."""
    return find_checkpoints(path)[0]


def _not_found(path: Path) -> CheckpointError:
    why = "no such directory" if not path.is_dir() else "it has no finished checkpoint"
    return CheckpointError(f"{path}: {why}{what_it_is(path, 'a run.dir that has trained, or one of its checkpoints')}")
