"""Folder in host memory (a tmpfs) for a node's copies of checkpoint files: its name, lock and removal.

    /dev/shm/headrace-UID/             mode 0700, of this user
        RUN.used                       lock file: shared by every process that uses the folder; the kernel lets go of it
        RUN/run                        the run's directory, for people
        RUN/step-00000400/__3_0.distcp a copy, under the name that it has in the run's directory

RUN is a checksum of the path of the run's directory. Needs no torch: the agents use it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.format.naming import PREFIX, step_of

_PARTIAL = ".partial"
_LEFT_S = 3600.0
"""Seconds without use after which another run's folder counts as left behind; before, its launcher may restart it."""


@dataclass(frozen=True)
class MemoryFolder:
    """The folder of one run on this node.

    Attributes:
        root: directory of all runs of this user.
        name: name of this run's folder: a checksum of `run_dir`.
        run_dir: the run's directory.
    """

    root: Path
    name: str
    run_dir: Path

    @classmethod
    def of(cls, directory: str, run_dir: Path) -> MemoryFolder:
        """Returns the folder of a run.

        Args:
            directory: a tmpfs, the value of `run.in_memory_checkpoints`.
            run_dir: the run's directory.
        """
        resolved = run_dir.resolve()
        name = hashlib.sha256(str(resolved).encode()).hexdigest()[:16]
        return cls(Path(directory) / f"headrace-{os.getuid()}", name, resolved)

    @property
    def path(self) -> Path:
        """Directory of the copies."""
        return self.root / self.name

    def folder(self, step: int) -> Path:
        """Returns the directory of the copies of one checkpoint."""
        return self.path / f"{PREFIX}{step:08d}"

    def partial(self, step: int, rank: int) -> Path:
        """Returns the directory in which a rank's copy is built."""
        return self.path / f".{rank}-{step}{_PARTIAL}"

    def sizes(self, step: int) -> dict[str, int]:
        """Returns the sizes of the copies of a checkpoint: file name -> bytes."""
        found: dict[str, int] = {}
        with suppress(OSError):
            for path in self.folder(step).iterdir():
                found[path.name] = path.stat().st_size
        return found

    def keep_only(self, step: int | None) -> None:
        """Removes partial copies and the copies of all other checkpoints; for None, all copies.

        Must be called while no rank copies.
        """
        with suppress(OSError):
            for path in self.path.iterdir():
                number = step_of(path.name)
                if path.name.endswith(_PARTIAL) or (number is not None and number != step):
                    shutil.rmtree(path, ignore_errors=True)

    def drop_before(self, step: int) -> None:
        """Removes the copies of earlier checkpoints."""
        with suppress(OSError):
            for path in self.path.iterdir():
                number = step_of(path.name)
                if number is not None and number < step:
                    shutil.rmtree(path, ignore_errors=True)

    def identity(self) -> tuple[str, int, int]:
        """Identifies the folder by the host's boot, file system and inode: equal on exactly the ranks that share it."""
        boot, found = Path("/proc/sys/kernel/random/boot_id"), self.path.stat()
        with suppress(OSError):
            return boot.read_text().strip(), found.st_dev, found.st_ino
        return os.uname().nodename, found.st_dev, found.st_ino


@contextmanager
def used(memory: MemoryFolder) -> Iterator[None]:
    """Makes the folder, and keeps others from removing it until the block or the process ends.

    Raises:
        OSError: the folder cannot be made, or belongs to another user.
    """
    _make(memory.root)
    handle = _lock(memory, fcntl.LOCK_SH)
    try:
        memory.path.mkdir(mode=0o700, exist_ok=True)
        with suppress(OSError):  # the tmpfs is full: the run trains without copies
            (memory.path / "run").write_text(f"{memory.run_dir}\n")
        yield
    finally:
        os.close(handle)


def remove(memory: MemoryFolder) -> bool:
    """Removes the folder unless a process uses it; returns whether it was removed."""
    try:
        handle = _lock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, or absent
        return False
    try:
        shutil.rmtree(memory.path, ignore_errors=True)
        _lock_file(memory).unlink(missing_ok=True)
    finally:
        os.close(handle)
    with suppress(OSError):
        memory.root.rmdir()  # fails while other runs have folders
    return True


def remove_left_behind(memory: MemoryFolder) -> list[str]:
    """Removes the folders of this user's runs whose processes have all ended; returns the runs' directories.

    A run without processes for less than an hour is left alone: its launcher may be about to start them again.
    """
    removed = []
    for lock in memory.root.glob("*.used"):
        other = MemoryFolder(memory.root, lock.stem, Path())
        with suppress(OSError):
            changed = max(lock.stat().st_mtime, other.path.stat().st_mtime)  # every copy changes the second
            if other.name == memory.name or time.time() - changed < _LEFT_S:
                continue
            named = other.path / "run"
            run_dir = named.read_text().strip() if named.exists() else other.name
            if remove(other):
                removed.append(run_dir)
    return removed


def _make(root: Path) -> None:
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{root} is not a directory that this user alone can enter: remove it")


def _lock_file(memory: MemoryFolder) -> Path:
    return memory.root / f"{memory.name}.used"


def _lock(memory: MemoryFolder, how: int) -> int:
    """Opens and locks the lock file, which another process may remove at any moment; returns its descriptor."""
    path = _lock_file(memory)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, how)
            os.utime(handle)
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        except FileNotFoundError:  # removed meanwhile
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
