"""Finds checkpoints by a place from the command line or a config: a run, one checkpoint, `latest`, or RUN@STEP."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foundation.errors import CheckpointError
from foundation.foreign_folders import what_it_is
from foundation.paths import is_url
from foundation.remote_run import fetch_checkpoint, pull, url_of
from foundation.storage import patiently, read_object
from pipeline.checkpoint.checkpoint import Checkpoint, StoredCheckpoint
from pipeline.checkpoint.format.metadata import METADATA, decode_metadata, read_metadata
from pipeline.checkpoint.format.naming import LATEST, step_of
from pipeline.checkpoint.format.shard_table import CheckpointMetadata
from pipeline.checkpoint.store import CheckpointStore

_AT_STEP = re.compile(r"(.+?)(?:@(\d+)|/checkpoints/step-(\d+)|/checkpoints/latest)?/?")


@dataclass(frozen=True)
class RunPlace:
    """A run, as a person names it, with one of its steps or without.

    Attributes:
        run: path or URL of the run.
        step: step of a checkpoint; None if the place names none.
    """

    run: str
    step: int | None

    @classmethod
    def parse(cls, text: str) -> RunPlace:
        """Parses RUN, RUN@STEP, RUN/checkpoints/step-STEP or .../latest; RUN is a path or a URL."""
        found = _AT_STEP.fullmatch(text)
        assert found is not None
        step = found[2] or found[3]
        return cls(found[1].rstrip("/") or "/", None if step is None else int(step))

    @property
    def home(self) -> Path | str:
        """The run in the form for `pins`: its URL in an object store, or its directory."""
        return self.run if is_url(self.run) else Path(self.run)

    def checkpoints(self) -> list[Checkpoint]:
        """Lists the run's checkpoints, newest first; those only in an object store are `StoredCheckpoint`s.

        Raises:
            CheckpointError: there is none.
            StorageError: the store cannot be read.
        """
        return find_checkpoints(pull(self.run) if is_url(self.run) else Path(self.run))


def checkpoints_of_steps(place: RunPlace, found: Sequence[Checkpoint], steps: Sequence[int]) -> list[Checkpoint]:
    """Picks the checkpoints of some steps from those of a run.

    Raises:
        CheckpointError: a step has no checkpoint; the error names the nearest that has one.
    """
    by_step = {each.step: each for each in found}
    for step in steps:
        if step not in by_step:
            near = sorted(sorted(by_step, key=lambda other: abs(other - step))[:2])
            there = " and ".join(f"{each:,}" for each in near)
            raise CheckpointError(
                f"{place.run} has no checkpoint of step {step:,}\n"
                f"  try: the nearest it has, of step {there}; run.keep_every keeps checkpoints of a run"
            )
    return [by_step[step] for step in steps]


def metadata_of(checkpoint: Checkpoint) -> CheckpointMetadata:
    """Reads the metadata of a checkpoint, on this host or in an object store.

    Raises:
        CheckpointError, StorageError: the metadata cannot be read.
    """
    if isinstance(checkpoint, StoredCheckpoint):
        return decode_metadata(patiently(partial(read_object, f"{checkpoint.url}/{METADATA}")))
    return read_metadata(checkpoint.path)


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
