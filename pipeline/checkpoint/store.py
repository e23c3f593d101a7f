"""The checkpoints of a run: `runs/NAME/checkpoints/step-00000100/`, whole or absent.

Every rank writes its shards into a staging directory; when all are done rank 0 writes the manifest with everybody's
checksums and renames it. A checkpoint that is deleted loses its name first. So a directory with a step's name is
always whole. `latest` is a link to the newest; it is for people and other tools, since a resume looks for itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from headrace.base.directory import Manifest, commit, fresh_staging, read_manifest, sha256_of_file, staging_path
from headrace.base.errors import CheckpointError, HeadraceError
from pipeline.checkpoint.naming import FOLDER, LATEST, PREFIX, finished

T = TypeVar("T")
_HASHING = 4
"""Threads of a rank that read a checkpoint: one does not keep up with a disk."""


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint: its directory, and the step after which it was written."""

    path: Path
    step: int

    @property
    def manifest(self) -> Manifest:
        """Its manifest: config, parents, and in `details` the step, the samples and the curve's fields."""
        return read_manifest(self.path, kind="checkpoint")


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint's manifest says besides its files."""

    step: int
    config: dict[str, Any]
    parents: dict[str, Any]
    details: dict[str, Any]


class CheckpointStore:
    """Names, finds and deletes the checkpoints of one run. `checkpoint.saving` writes them.

    Args:
        run_dir: the run's directory.
        keep: how many of the newest stay.
        keep_every: those of every so many steps stay for ever; None for none.
    """

    def __init__(self, run_dir: Path, *, keep: int, keep_every: int | None = None) -> None:
        self._root, self._keep, self._keep_every = run_dir / FOLDER, keep, keep_every

    def all(self) -> list[Checkpoint]:
        """Finished checkpoints, newest first."""
        return [Checkpoint(path, step) for step, path in finished(self._root.parent)]

    def final(self, step: int) -> Path:
        """What the checkpoint of a step is called."""
        return self._root / f"{PREFIX}{step:08d}"

    def stage(self, step: int) -> Path:
        """An empty directory to write a step's checkpoint into. On one rank."""
        return fresh_staging(self.final(step))

    def abandon(self, step: int) -> None:
        """Deletes what was written for a step: a full disk gets its room back. On one rank."""
        shutil.rmtree(staging_path(self.final(step)), ignore_errors=True)

    def commit(self, about: CheckpointInfo, sha256: Mapping[str, str]) -> Checkpoint:
        """Gives a written checkpoint its name, moves `latest` there, and deletes older ones. On one rank.

        Args:
            about: goes into the manifest.
            sha256: checksums of the files that need not be read again.
        """
        final = self.final(about.step)
        commit(
            staging_path(final),
            final,
            kind="checkpoint",
            config=about.config,
            parents=about.parents,
            details=about.details,
            replace=True,
            known_sha256=sha256,
        )
        self._point_to(final)
        with suppress(OSError):  # it has its name; what cannot be deleted is tried again after the next one
            self._prune(about.step)
        return Checkpoint(final, about.step)

    def newest_whole(
        self, say: Callable[[str], None], *, alive: Callable[[], None] = lambda: None
    ) -> Checkpoint | None:
        """The newest checkpoint whose checksums hold, or None when the run has none at all. Collective.

        The ranks share the reading. A damaged one is passed over, and `say` is told.

        Args:
            say: takes a line for people.
            alive: called while files are read, which may take minutes.

        Raises:
            CheckpointError: there are some, and none is whole.
        """
        on_rank_zero(self._clean)
        candidates = on_rank_zero(self.all)
        for candidate in candidates:
            damage = damage_found_by_all(candidate, alive)
            if damage is None:
                return candidate
            say(f"warning: {candidate.path} is damaged ({damage}); going back to the one before")
        if candidates:
            raise CheckpointError(
                f"all {len(candidates)} checkpoints in {self._root} are damaged\n"
                f"  try: restore one, or remove the directory to start over"
            )
        return None

    def _point_to(self, final: Path) -> None:
        link, new = self._root / LATEST, self._root / f".{LATEST}.new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(final.name)
            new.replace(link)
        except OSError:  # a file system without links: nothing of ours reads it
            new.unlink(missing_ok=True)

    def _prune(self, newest: int) -> None:
        """Deletes the oldest of those up to a step. Later ones are damaged: the run has gone back behind them."""
        for old in [each for each in self.all() if each.step <= newest][self._keep :]:
            if self._keep_every is not None and old.step % self._keep_every == 0:
                continue
            doomed = old.path.with_name(f".{old.path.name}.deleted")
            shutil.rmtree(doomed, ignore_errors=True)
            old.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)  # what stays is cleaned at the next start

    def _clean(self) -> None:
        """Deletes what a killed run left half-written or half-deleted; such a directory has no name of a checkpoint."""
        for aside in self._root.glob(f".{PREFIX}*.replaced"):
            name = aside.name.removeprefix(".").removesuffix(".replaced")
            if not (self._root / name).exists():
                aside.rename(self._root / name)  # killed between moving it aside and putting the new one
        for leftover in (*self._root.glob(f".{PREFIX}*.partial"), *self._root.glob(f".{PREFIX}*.deleted")):
            shutil.rmtree(leftover, ignore_errors=True)
        for newest in self.all()[:1]:
            self._point_to(newest.path)


def on_rank_zero(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 and gives its result, or its error, to all ranks; alone, it just runs it."""
    outcome: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except HeadraceError as error:
            outcome[1] = error
        except OSError as error:
            outcome[1] = CheckpointError(f"{error}\n  try: free space or fix the permissions, then start again")
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def raise_together(failed: str | None, what: str) -> None:
    """Raises CheckpointError on all ranks when `failed` says why on any. Collective."""
    failures: list[str | None] = [failed]
    if dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failed)
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(
                f"{what}: rank {rank}: {failure}\n  try: free space there, then start again: it resumes"
            )


def damage_of(checkpoint: Checkpoint) -> str | None:
    """What is wrong with a checkpoint's files, by their checksums; None when nothing is."""
    return _damage(checkpoint, 0, 1, lambda: None)


def damage_found_by_all(checkpoint: Checkpoint, alive: Callable[[], None]) -> str | None:
    """The same, each rank reading a share of the files. Collective."""
    if not dist.is_initialized():
        return _damage(checkpoint, 0, 1, alive)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _damage(checkpoint, dist.get_rank(), dist.get_world_size(), alive))
    return next((damage for damage in found if damage is not None), None)


def _damage(checkpoint: Checkpoint, rank: int, ranks: int, alive: Callable[[], None]) -> str | None:
    """Of every file whose number is `rank` modulo `ranks`."""
    try:
        files = list(checkpoint.manifest.files.items())[rank::ranks]
    except HeadraceError as error:
        return str(error).splitlines()[0]

    def read(path: Path) -> str:
        return sha256_of_file(path, lambda _bytes: alive())

    def is_whole(name: str, entry: Mapping[str, Any]) -> bool:
        path = checkpoint.path / name
        try:
            return path.stat().st_size == int(entry["bytes"]) and read(path) == str(entry["sha256"])
        except OSError:
            return False

    with ThreadPoolExecutor(_HASHING) as readers:
        whole = list(readers.map(lambda file: is_whole(*file), files))
    bad = next((name for (name, _), good in zip(files, whole, strict=True) if not good), None)
    return bad and f"{bad} does not have the checksum it was written with"
