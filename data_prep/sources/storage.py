"""Input storage: local files, or URLs (`s3://`, `hf://`, `gs://`, ...), which `foundation.storage` opens.

All access to input bytes goes through this module. Outputs and job directories are on local or shared file systems:
they need atomic renames, which object stores lack.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from foundation.storage import Stat, filesystem, is_remote, stat_of, storage_errors

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
"""Directories of a corpus that are skipped, like hidden ones."""
_GLOB_CHARACTER = re.compile(r"[*?\[]")
_BLOCK_BYTES = 8 << 20  # per request to a remote file


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A remote file of a listing.

    Attributes:
        name: path relative to the listed URL.
        url: URL of the file.
        stat: size and version of the file.
        named: whether the URL or its glob matches the file itself, rather than a directory that contains it.
    """

    name: str
    url: str
    stat: Stat
    named: bool


COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
"""Suffixes of compressed files; these cannot be read from the middle."""


def is_compressed(path: str) -> bool:
    """Whether a file is compressed, according to its name."""
    return path.endswith((*COMPRESSED, ".tgz"))


def stat(path: str) -> Stat:
    """Size and version of a file.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if not is_remote(path):
        return local_stat(os.stat(path))  # noqa: PTH116 - called for a million files
    with storage_errors(path, missing=False):
        files, inner = filesystem(path)
        return stat_of(files.info(inner))


def local_stat(found: os.stat_result) -> Stat:
    """Size and version of a local file, from its `os.stat`."""
    return Stat(found.st_size, f"mtime={found.st_mtime_ns}")


def open_raw(path: str) -> BinaryIO:
    """Opens a file for reading; it is seekable, and unbuffered if it is local.

    Raises:
        OSError: a local file cannot be opened.
        StorageError: any error of a remote file, now or on a later read.
    """
    if not is_remote(path):
        return cast(BinaryIO, io.FileIO(path))
    with storage_errors(path):
        files, inner = filesystem(path)
        return cast(BinaryIO, _RemoteReader(files.open(inner, "rb", block_size=_BLOCK_BYTES), path))


class _RemoteReader(io.RawIOBase):
    """A remote file; the storage's exceptions become a `StorageError`."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        with storage_errors(self._url):
            return cast(bytes, self._file.read(size))

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with storage_errors(self._url):
            return int(self._file.readinto(buffer))

    def close(self) -> None:
        self._file.close()
        super().close()


def listing(path: str) -> list[RemoteFile]:
    """Lists the files of a URL: the file itself, all files in a directory, or files that a glob matches or contains.

    A literal file or directory has precedence: `data[1].jsonl` is a glob only if no file has this name.

    Returns:
        The files, sorted by name, without hidden files and directories and `SKIPPED_FOLDERS`.

    Raises:
        StorageError: the storage cannot be reached.
        DataError: the package for the protocol is missing.
    """
    with storage_errors(path):
        files, inner = filesystem(path)
        if _GLOB_CHARACTER.search(inner) and not _exists(files, inner):
            root = inner[: _GLOB_CHARACTER.search(inner).start()].rpartition("/")[0]  # type: ignore[union-attr]
            named, inside = _matching(files, inner)
        else:
            found = files.find(inner, detail=True)
            itself = list(found) == [inner]
            root = inner.rpartition("/")[0] if itself else inner.rstrip("/")
            named, inside = (found, {}) if itself else ({}, found)
        listed = [
            RemoteFile(name[len(root) :].lstrip("/"), files.unstrip_protocol(name), stat_of(info), name in named)
            for name, info in (inside | named).items()
            if _is_file(info)
        ]
    return sorted((entry for entry in listed if not _hidden(entry.name)), key=lambda entry: entry.name)


def _matching(filesystem: Any, pattern: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The files that a glob matches, and the files in the directories that it matches."""
    named = filesystem.glob(pattern, detail=True)
    inside: dict[str, Any] = {}
    last = None
    for folder in sorted(f"{name}/" for name, info in named.items() if not _is_file(info)):
        if last is None or not folder.startswith(last):
            last = folder
            inside |= filesystem.find(folder.rstrip("/"), detail=True)
    return named, inside


def _exists(filesystem: Any, name: str) -> bool:
    try:
        return bool(filesystem.exists(name))
    except Exception:  # a storage may refuse an invalid name, such as a bucket with a star in it
        return False


def parquet_source(path: str) -> Any:
    """Makes the argument for pyarrow: a local path, which it memory-maps, or an open file.

    Remote files and names that are not UTF-8, which pyarrow refuses, are opened.
    """
    return open_raw(path) if is_remote(path) or not _is_utf8(path) else path


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_file(info: dict[str, Any]) -> bool:
    return info.get("type") == "file"


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part in SKIPPED_FOLDERS for part in Path(name).parts)
