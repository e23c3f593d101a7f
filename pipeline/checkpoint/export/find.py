"""Finds checkpoints by a path from the command line: a run directory, one checkpoint, or `latest`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foundation.errors import CheckpointError
from foundation.foreign_folders import what_it_is
from foundation.remote_run import fetch_checkpoint, url_of
from pipeline.checkpoint.checkpoint import Checkpoint, StoredCheckpoint
from pipeline.checkpoint.format.naming import LATEST, step_of
from pipeline.checkpoint.store import CheckpointStore


def is_checkpoint(path: Path) -> bool:
    """Whether a path names one checkpoint rather than a run."""
    return path.name == LATEST or step_of(path.name) is not None


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """Lists the checkpoints of a run directory, newest first, or the one checkpoint at `path`.

    Checkpoints that exist only in the run's object store are included, as `StoredCheckpoint`.

    Raises:
        CheckpointError: there is none.
        StorageError: the store cannot be listed.
    """
    if is_checkpoint(path):
        path = path.resolve() if path.name == LATEST else path
        step = step_of(path.name)
        if step is None or not path.is_dir():
            raise _not_found(path)
        return [Checkpoint(path, step)]
    found = CheckpointStore(path, keep=1, url=url_of(path)).candidates()
    here = {each.step for each in found if not isinstance(each, StoredCheckpoint)}
    found = [each for each in found if not isinstance(each, StoredCheckpoint) or each.step not in here]
    if not found:
        raise _not_found(path)
    return found


def find_checkpoint(path: Path) -> Checkpoint:
    """Returns the newest of `find_checkpoints`, copied to this host if necessary."""
    return on_this_host(find_checkpoints(path)[0])


def on_this_host(checkpoint: Checkpoint, *, progress: Callable[[int], None] = lambda _bytes: None) -> Checkpoint:
    """Returns a checkpoint that is on this host: one in an object store is copied into the directory of its run.

    Args:
        checkpoint: one of `find_checkpoints`.
        progress: called with the bytes of each file that was copied.

    Raises:
        DataError: there is no room, or a checksum differs.
        StorageError: the store cannot be read.
    """
    if not isinstance(checkpoint, StoredCheckpoint):
        return checkpoint
    fetch_checkpoint(checkpoint.url, checkpoint.path, progress=progress)
    return Checkpoint(checkpoint.path, checkpoint.step)


def _not_found(path: Path) -> CheckpointError:
    why = "no such directory" if not path.is_dir() else "it has no finished checkpoint"
    return CheckpointError(f"{path}: {why}{what_it_is(path, 'a run.dir that has trained, or one of its checkpoints')}")
