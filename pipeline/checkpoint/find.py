"""Finding checkpoints by what a person types: a run, a checkpoint, `latest`."""

from __future__ import annotations

from pathlib import Path

from headrace.base.errors import CheckpointError
from pipeline.checkpoint.naming import LATEST, step_of
from pipeline.checkpoint.store import Checkpoint, CheckpointStore


def is_checkpoint(path: Path) -> bool:
    """Whether a path names one checkpoint and not a run."""
    return path.name == LATEST or step_of(path.name) is not None


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """The checkpoints of a run directory, newest first, or the one checkpoint that `path` is.

    Raises:
        CheckpointError: there is none.
    """
    if is_checkpoint(path):
        path = path.resolve() if path.name == LATEST else path
        step = step_of(path.name)
        return [Checkpoint(path, step)] if step is not None and path.is_dir() else _none(path)
    found = CheckpointStore(path, keep=1).all()
    return found or _none(path)


def find_checkpoint(path: Path) -> Checkpoint:
    """The newest of `find_checkpoints`."""
    return find_checkpoints(path)[0]


def _none(path: Path) -> list[Checkpoint]:
    why = "no such directory" if not path.is_dir() else "it has no finished checkpoint"
    raise CheckpointError(f"{path}: {why}\n  try: a run.dir that has trained, or one of its checkpoints")
