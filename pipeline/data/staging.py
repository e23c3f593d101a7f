"""Staging: tokens directories are copied to a disk of this node, and read from there (`data.stage_to`).

Every rank calls `stage`. The first rank of a node copies, computes checksums meanwhile, and renames the copy when it is
complete; the others wait for it. The copy is a tokens directory itself, named after the fingerprint, so that the next
start and other runs on the same tokens use it. A killed process leaves nothing under that name.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from foundation.directory import MANIFEST, Manifest, check_sizes, free_bytes, read_manifest, sync
from foundation.errors import DataError
from foundation.lock import LockedError, lock_file
from foundation.paths import is_url
from foundation.remote_directory import fetch_files, read_remote_manifest

_CHUNK = 8 << 20
_MARGIN = 1.02
"""Space required, relative to the files' sizes: includes directories and partly filled blocks."""


@dataclass(frozen=True)
class StagedCopy:
    """A copy on this node's disk.

    Attributes:
        original: the tokens directory, or its URL.
        path: path of the copy.
        copied_bytes: bytes that this process copied; 0 if the copy existed or another process made it.
        seconds: seconds spent on copying, or on waiting for another process to copy.
    """

    original: str
    path: Path
    copied_bytes: int
    seconds: float

    def __str__(self) -> str:
        if not self.copied_bytes:
            return f"staged data: {self.original} is read from {self.path}"
        rate = self.copied_bytes / max(self.seconds, 1e-9) / 1e6
        return (
            f"staged data: {self.original} was copied to {self.path}: {self.copied_bytes / 1e9:,.3f} GB in"
            f" {self.seconds:.1f} s ({rate:,.0f} MB/s), checksums are right"
        )


def copy_path(to: Path, origin: str | Path, manifest: Manifest) -> Path:
    """Returns the path of the copy of a tokens directory."""
    return to / f"{PurePosixPath(origin).name}-{manifest.fingerprint[:16]}"


def check_space(to: Path, origin: str | Path, manifest: Manifest) -> None:
    """Refuses a copy that the disk has no room for; nothing is written.

    Space of files that the copy removes first, such as partial copies, counts as free.

    Raises:
        DataError: there is no room; names the space needed, the space free, and the other copies there.
    """
    final = copy_path(to, origin, manifest)
    if _is_whole(final, manifest):
        return
    free, needed = free_bytes(to) + sum(map(_bytes_on_disk, _left_behind(final))), int(manifest.bytes * _MARGIN)
    if needed > free:
        others = [each.name for each in sorted(to.glob("*")) if (each / MANIFEST).is_file()]
        remedy = f"remove copies that no run needs ({', '.join(others)})" if others else "use a larger disk"
        raise DataError(
            f"data.stage_to: {origin} has {needed / 1e9:,.2f} GB, and {to} on {socket.gethostname()} has"
            f" {free / 1e9:,.2f} GB free; nothing was copied\n  try: {remedy}, or leave data.stage_to out"
        )


def stage(to: Path, origin: str | Path, manifest: Manifest, *, progress: Callable[[], None]) -> StagedCopy:
    """Copies a tokens directory to this node's disk, unless the disk has a complete copy.

    Args:
        to: directory on the node's disk; created if missing.
        origin: the tokens directory, or its URL.
        manifest: manifest of the tokens directory.
        progress: function that is called while bytes are copied, and while another process copies.

    Raises:
        DataError: there is no room, or a file's checksum differs from the manifest's.
        StorageError: the store cannot be read.
    """
    began, final, original = time.monotonic(), copy_path(to, origin, manifest), str(origin)
    to.mkdir(parents=True, exist_ok=True)
    lock = to / f".{final.name}.lock"
    with lock_file(lock, doing=f"copying {origin} to {to}", timeout_s=math.inf, wait=progress):
        if _is_whole(final, manifest):
            return StagedCopy(original, final, 0, time.monotonic() - began)
        for left in _left_behind(final):
            shutil.rmtree(left, ignore_errors=True)
        check_space(to, origin, manifest)
        _copy(original, final, manifest, progress)
    return StagedCopy(original, final, manifest.bytes, time.monotonic() - began)


@contextmanager
def in_use(copy: Path) -> Iterator[None]:
    """Keeps other runs from removing a copy while this process reads it; must be entered before `stage`."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(_used(copy), doing=f"removing {copy}", shared=True, timeout_s=math.inf):
        yield


def remove_copy(copy: Path) -> bool:
    """Removes a copy that no process uses; returns whether it was removed."""
    try:
        with lock_file(_used(copy), doing=f"reading {copy}"):
            going = copy.parent / f".{copy.name}.removed.partial"
            copy.rename(going)  # a half-removed copy must not look complete
            shutil.rmtree(going)
    except (LockedError, OSError):  # in use, or another process has removed it
        return False
    return True


def _used(copy: Path) -> Path:
    """Returns the path of the lock file on which readers of a copy hold a shared lock."""
    return copy.parent / f".{copy.name}.used"


def _copy(origin: str, final: Path, manifest: Manifest, progress: Callable[[], None]) -> None:
    partial = final.parent / f".{final.name}.{socket.gethostname()}-{os.getpid()}.partial"
    try:
        if is_url(origin):
            partial.mkdir()
            text = read_remote_manifest(origin)[0]
            fetch_files(origin, manifest.files, partial, progress=lambda _bytes: progress())
        else:
            text = (Path(origin) / MANIFEST).read_bytes()
            _copy_files(Path(origin), partial, manifest, progress)
        (partial / MANIFEST).write_bytes(text)
        sync(partial / MANIFEST)
        sync(partial)
        with suppress(OSError):  # another host has put it there: the disk is shared after all
            partial.rename(final)
        sync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_files(path: Path, partial: Path, manifest: Manifest, progress: Callable[[], None]) -> None:
    for name, entry in manifest.files.items():
        found = _copy_file(path / name, partial / name, progress)
        if found != entry["sha256"]:
            raise DataError(
                f"{path / name} has another checksum than its manifest says: the file is damaged, or was damaged"
                f" on the way to {partial.parent}\n  try: headrace prep verify {path}"
            )


def _copy_file(source: Path, target: Path, progress: Callable[[], None]) -> str:
    """Copies a file to disk and returns the SHA-256 of what was read."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with source.open("rb") as read, target.open("wb") as write:
        while chunk := read.read(_CHUNK):
            digest.update(chunk)
            write.write(chunk)
            progress()
        write.flush()
        os.fsync(write.fileno())
    return digest.hexdigest()


def _is_whole(copy: Path, manifest: Manifest) -> bool:
    try:
        found = read_manifest(copy, kind="tokens")
        check_sizes(copy, found)
    except (DataError, OSError):
        return False
    return found.fingerprint == manifest.fingerprint


def _left_behind(final: Path) -> list[Path]:
    """Paths to remove before a copy is made: a damaged copy, and partial copies of killed processes.

    Partial copies of other hosts stay, in case the disk is shared after all.
    """
    partial = final.parent.glob(f".{final.name}.{socket.gethostname()}-*.partial")
    return [*partial, final.parent / f".{final.name}.removed.partial", final]


def _bytes_on_disk(directory: Path) -> int:
    """Returns the bytes of the disk blocks of a directory's files; 0 for a directory that does not exist."""
    found = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # another process may be removing or renaming it
            found += path.lstat().st_blocks * 512
    return found
