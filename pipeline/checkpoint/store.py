"""The checkpoints of a run, `runs/NAME/checkpoints/step-00000100/`: atomic commit, retention, choice for a resume.

Every rank writes its shards into a staging directory. When all are done, rank 0 writes the manifest with the checksums
of all ranks and renames the directory. A checkpoint is renamed before it is deleted. So a directory with a step's name
is always complete. `latest` is a link to the newest checkpoint, for people and other tools; a resume does not use it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from foundation.directory import check_sizes, commit, fresh_staging, staging_path
from foundation.errors import CheckpointError, HeadraceError
from foundation.remote_run import remote_checkpoints
from pipeline.checkpoint.checkpoint import Checkpoint, CheckpointInfo, StoredCheckpoint
from pipeline.checkpoint.damage import find_damage_collective
from pipeline.checkpoint.fetch import fetch_collective
from pipeline.checkpoint.format.naming import FOLDER, LATEST, PREFIX, finished_checkpoints
from pipeline.checkpoint.memory.restart_files import RestartFiles
from pipeline.checkpoint.pins import pinned_steps
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero


class CheckpointStore:
    """Names, commits, finds and deletes the checkpoints of one run. `checkpoint.save` writes them.

    Args:
        run_dir: the run's directory.
        keep: number of newest complete checkpoints to keep.
        keep_every: number that divides the steps whose complete checkpoints are never deleted; None for none.
        url: URL of the run in an object store that may have more checkpoints, or None. The uploader deletes old
            checkpoints there.

    Attributes:
        start: checkpoint of another run with which this run begins; None without one.
    """

    def __init__(self, run_dir: Path, *, keep: int, keep_every: int | None = None, url: str | None = None) -> None:
        self.start: Checkpoint | None = None
        self._root, self._keep, self._keep_every, self._url = run_dir / FOLDER, keep, keep_every, url
        self._damaged: set[Path] = set()

    def checkpoints(self) -> list[Checkpoint]:
        """Returns the finished checkpoints, newest first."""
        return [Checkpoint(path, step) for step, path in finished_checkpoints(self._root.parent)]

    def candidates(self) -> list[Checkpoint]:
        """Checkpoints from which a run may resume, newest first: on this host, then in the object store.

        Raises:
            StorageError: the store cannot be listed.
        """
        here = self.checkpoints()
        stored = remote_checkpoints(self._url) if self._url is not None else []
        found = [StoredCheckpoint(self.path_of(each.step), each.step, each.url) for each in stored]
        return sorted([*here, *found], key=lambda each: each.step, reverse=True)  # stable

    def path_of(self, step: int) -> Path:
        """Returns the final directory of the checkpoint of a step."""
        return self._root / f"{PREFIX}{step:08d}"

    def create_staging(self, step: int) -> Path:
        """Makes an empty staging directory for a step's checkpoint. Runs on one rank."""
        return fresh_staging(self.path_of(step))

    def discard_staging(self, step: int) -> None:
        """Deletes the staging directory of a step, which frees space on a full disk. Runs on one rank."""
        shutil.rmtree(staging_path(self.path_of(step)), ignore_errors=True)

    def commit(self, info: CheckpointInfo, sha256: Mapping[str, str]) -> Checkpoint:
        """Renames a written checkpoint to its final name, moves `latest`, and deletes old ones. Runs on one rank.

        Args:
            info: contents of the manifest.
            sha256: file name -> checksum of files that need not be read again.
        """
        final = self.path_of(info.step)
        commit(
            staging_path(final),
            final,
            kind="checkpoint",
            config=info.config,
            parents=info.parents,
            details=info.details,
            replace=True,
            known_sha256=sha256,
        )
        self._damaged.discard(final)  # written anew
        self._link_latest(final)
        with suppress(OSError):  # the checkpoint is committed; a failed deletion is retried after the next commit
            self._prune(info.step)
        return Checkpoint(final, info.step)

    def newest_intact(
        self,
        log: Callable[[str], None],
        *,
        on_progress: Callable[[], None] = lambda: None,
        files: RestartFiles | None = None,
    ) -> Checkpoint | None:
        """Finds the newest checkpoint whose checksums match; None if the run has no checkpoints. Collective.

        Each rank verifies a share of the files. Damaged checkpoints are skipped with a warning.

        Args:
            log: called with each warning.
            on_progress: called while files are read, which may take minutes.
            files: finder of copies in memory, which are verified instead of the files; also counts the bytes read.

        Raises:
            CheckpointError: the run has checkpoints, but no intact one.
        """
        on_rank_zero(self._clean_up)
        candidates, files = on_rank_zero(self.candidates), files or RestartFiles()
        if self.start is not None:
            candidates = [*candidates, self.start]
        for candidate in candidates:
            if isinstance(candidate, StoredCheckpoint):
                log(f"fetching {candidate.url}")
                damage = fetch_collective(candidate, on_progress)
            else:
                damage = find_damage_collective(candidate, on_progress, files)
            if damage is None:
                files.chosen(candidate.step)
                return Checkpoint(candidate.path, candidate.step)
            self._damaged.add(candidate.path)
            where = candidate.url if isinstance(candidate, StoredCheckpoint) else candidate.path
            log(f"warning: {where} is damaged ({damage}); going back to the one before")
        if candidates:
            raise CheckpointError(
                f"all {len(candidates)} checkpoints in {self._root} are damaged\n"
                f"  try: restore one, or remove the directory to start over"
            )
        files.chosen(None)
        return None

    def _link_latest(self, final: Path) -> None:
        link, new = self._root / LATEST, self._root / f".{LATEST}.new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(final.name)
            new.replace(link)
        except OSError:  # a file system without symbolic links: nothing here reads it
            new.unlink(missing_ok=True)

    def _prune(self, newest: int) -> None:
        """Deletes checkpoints up to a step that are older than the newest `keep` complete ones.

        Damaged checkpoints do not count towards `keep`, so that none replaces an intact one; they are deleted once they
        are that old. Checkpoints after `newest` are damaged: the run was resumed from before them. A checkpoint that a
        branch or a merge needs stays (`pins`).
        """
        complete, pinned = 0, pinned_steps(self._root.parent)
        for old in [each for each in self.checkpoints() if each.step <= newest]:
            whole = self._looks_complete(old)
            complete += whole
            kept_for_ever = whole and self._keep_every is not None and old.step % self._keep_every == 0
            if complete <= self._keep - (not whole) or kept_for_ever or old.step in pinned:
                continue
            deleted = old.path.with_name(f".{old.path.name}.deleted")
            shutil.rmtree(deleted, ignore_errors=True)
            old.path.rename(deleted)
            shutil.rmtree(deleted, ignore_errors=True)  # what remains is deleted at the next start

    def _looks_complete(self, checkpoint: Checkpoint) -> bool:
        """Whether manifest and file sizes are intact, and no damage was found when this process started.

        Reads no contents, since a save must not read back terabytes. Flipped bits are found when a run resumes.
        """
        if checkpoint.path in self._damaged:
            return False
        try:
            check_sizes(checkpoint.path, checkpoint.manifest)
        except (HeadraceError, OSError):
            return False
        return True

    def _clean_up(self) -> None:
        """Deletes directories that a killed run left half-written or half-deleted; their names show it."""
        for replaced in self._root.glob(f".{PREFIX}*.replaced"):
            name = replaced.name.removeprefix(".").removesuffix(".replaced")
            if not (self._root / name).exists():
                replaced.rename(self._root / name)  # killed between moving it aside and renaming the new one
        for leftover in (*self._root.glob(f".{PREFIX}*.partial"), *self._root.glob(f".{PREFIX}*.deleted")):
            shutil.rmtree(leftover, ignore_errors=True)
        for newest in self.checkpoints()[:1]:
            self._link_latest(newest.path)
