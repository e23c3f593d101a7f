"""The checkpoints of a run: `runs/NAME/checkpoints/step-00000100/`, whole or absent.

Every rank writes its shards into a staging directory; when all are done rank 0 checksums it, writes the manifest and
renames it. A checkpoint that is deleted loses its name first. So a directory with a step's name is always whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from headrace.directory import Manifest, commit, fresh_staging, read_manifest, staging_path, verify
from headrace.errors import CheckpointError, HeadraceError
from headrace.interrupts import finished_first

T = TypeVar("T")
_PREFIX = "step-"


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint: its directory, and the step after which it was written."""

    path: Path
    step: int

    @property
    def manifest(self) -> Manifest:
        """Its manifest: config, parents, and in `details` the step, the samples and the curve's fields."""
        return read_manifest(self.path, kind="checkpoint")


class CheckpointStore:
    """Writes, finds and deletes the checkpoints of one run.

    Args:
        run_dir: the run's directory.
        keep: how many of the newest stay.
    """

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self._root, self._keep = run_dir / "checkpoints", keep

    def all(self) -> list[Checkpoint]:
        """Finished checkpoints, newest first."""
        found = [p for p in self._root.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdigit()]
        return sorted((Checkpoint(p, int(p.name.removeprefix(_PREFIX))) for p in found), key=lambda c: -c.step)

    def save(
        self,
        write: Callable[[Path], None],
        *,
        step: int,
        config: dict[str, Any],
        parents: dict[str, Any],
        details: dict[str, Any],
    ) -> Checkpoint:
        """Writes a checkpoint. Collective.

        Args:
            write: writes the calling rank's shards into a directory.
            step: the last step that is in it.

        Raises:
            CheckpointError: on all ranks when any could not write, e.g. on a full disk. Nothing has a final name then.
        """
        final = self._root / f"{_PREFIX}{step:08d}"
        staging = staging_path(final)

        def finish() -> None:
            commit(staging, final, kind="checkpoint", config=config, parents=parents, details=details, replace=True)
            self._prune()

        with finished_first(f"the checkpoint of step {step}"):
            on_rank_zero(lambda: fresh_staging(final))
            failed: str | None = None
            try:
                write(staging)
            except (OSError, RuntimeError, CheckpointError) as error:
                failed = str(error) or repr(error)
            raise_together(failed, f"checkpoint of step {step} could not be written to {final}")
            on_rank_zero(finish)
        return Checkpoint(final, step)

    def newest_whole(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint whose checksums hold, or None when the run has none at all. Collective.

        A damaged one is passed over, and `say` is told. Raises CheckpointError when there are some and none is whole.
        """
        return on_rank_zero(lambda: self._search(say))

    def _search(self, say: Callable[[str], None]) -> Checkpoint | None:
        self._clean()
        candidates = self.all()
        for candidate in candidates:
            damage = damage_of(candidate)
            if damage is None:
                return candidate
            say(f"warning: {candidate.path} is damaged ({damage}); going back to the one before")
        if candidates:
            raise CheckpointError(
                f"all {len(candidates)} checkpoints in {self._root} are damaged\n"
                f"  try: restore one, or remove the directory to start over"
            )
        return None

    def _prune(self) -> None:
        for old in self.all()[self._keep :]:
            doomed = old.path.with_name(f".{old.path.name}.deleted")
            shutil.rmtree(doomed, ignore_errors=True)
            old.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)  # what stays is cleaned at the next start

    def _clean(self) -> None:
        """Deletes what a killed run left half-written or half-deleted; such a directory has no name of a checkpoint."""
        for leftover in (*self._root.glob(f".{_PREFIX}*.partial"), *self._root.glob(f".{_PREFIX}*.deleted")):
            shutil.rmtree(leftover, ignore_errors=True)


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
    try:
        bad = next((name for name, whole in verify(checkpoint.path, checkpoint.manifest) if not whole), None)
    except HeadraceError as error:
        return str(error).splitlines()[0]
    return bad and f"{bad} does not have the checksum it was written with"
