"""Input storage: local files, or URLs that `fsspec` opens (`s3://`, `hf://`, `gs://`, ...).

All access to input bytes goes through this module. Outputs and job directories are on local or shared file systems:
they need atomic renames, which object stores lack.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from headrace.base.errors import DataError, HeadraceError

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
"""Directories of a corpus that are skipped, like hidden ones."""
_GLOB_CHARACTER = re.compile(r"[*?\[]")
_BLOCK_BYTES = 8 << 20  # per request of a remote file
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified")
"""Keys of file metadata by which the storage types distinguish versions of a file."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Size and version of a file.

    Attributes:
        bytes: size as stored.
        version: `KEY=VALUE` from the storage's metadata, or empty if it has none.
    """

    bytes: int
    version: str

    def differs_from(self, before: Stat) -> bool:
        """Whether the file was changed since `before`: another size, or another value of the same version key."""
        keys = [stat.version.partition("=")[0] for stat in (self, before)]
        return self.bytes != before.bytes or (keys[0] == keys[1] and self.version != before.version)


class StorageError(DataError):
    """A remote file cannot be opened or read; the message contains the storage's own error."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A remote file of a listing.

    Attributes:
        name: relative to the listed URL.
        url, stat: of the file.
        named: whether the URL or its glob matches the file itself, rather than a directory that contains it.
    """

    name: str
    url: str
    stat: Stat
    named: bool


COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
"""Suffixes of compressed files; these cannot be read from the middle."""


def is_compressed(path: str) -> bool:
    """Whether a file is compressed, by its name."""
    return path.endswith(COMPRESSED)


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def stat(path: str) -> Stat:
    """Size and version of a file.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if not is_remote(path):
        found = os.stat(path)  # noqa: PTH116 - called for a million files
        return Stat(found.st_size, f"mtime={found.st_mtime_ns}")
    with _storage_errors(path):
        filesystem, inner = _filesystem(path)
        return _stat(filesystem.info(inner))


def open_raw(path: str) -> BinaryIO:
    """Opens a file for reading; it is seekable, and unbuffered if it is local.

    Raises:
        OSError: a local file cannot be opened.
        StorageError: any error of a remote file, now or on a later read.
    """
    if not is_remote(path):
        return cast(BinaryIO, io.FileIO(path))
    with _storage_errors(path, missing=True):
        filesystem, inner = _filesystem(path)
        return cast(BinaryIO, _RemoteReader(filesystem.open(inner, "rb", block_size=_BLOCK_BYTES), path))


class _RemoteReader(io.RawIOBase):
    """A remote file; exceptions of its storage become a `StorageError`."""

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
        with _storage_errors(self._url, missing=True):
            return cast(bytes, self._file.read(size))

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with _storage_errors(self._url, missing=True):
            return int(self._file.readinto(buffer))

    def close(self) -> None:
        self._file.close()
        super().close()


def listing(path: str) -> list[RemoteFile]:
    """Lists the files of a URL: the file itself, all files in a directory, or those that a glob matches or contains.

    An existing file or directory of the literal name has precedence: `data[1].jsonl` is a glob only if there is none.

    Returns:
        the files, sorted by name, without hidden files and directories and `SKIPPED_FOLDERS`.

    Raises:
        StorageError: the storage cannot be reached.
        DataError: the package for the protocol is missing.
    """
    with _storage_errors(path, missing=True):
        filesystem, inner = _filesystem(path)
        if _GLOB_CHARACTER.search(inner) and not _exists(filesystem, inner):
            root = inner[: _GLOB_CHARACTER.search(inner).start()].rpartition("/")[0]  # type: ignore[union-attr]
            named, inside = _matching(filesystem, inner)
        else:
            found = filesystem.find(inner, detail=True)
            itself = list(found) == [inner]
            root = inner.rpartition("/")[0] if itself else inner.rstrip("/")
            named, inside = (found, {}) if itself else ({}, found)
        listed = [
            RemoteFile(name[len(root) :].lstrip("/"), filesystem.unstrip_protocol(name), _stat(info), name in named)
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
    """The argument for pyarrow: a local path, which it memory-maps, or an open file if it is remote or if its name is
    not UTF-8, which pyarrow does not take."""
    return open_raw(path) if is_remote(path) or not _is_utf8(path) else path


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stat(info: dict[str, Any]) -> Stat:
    versions = (f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key))
    return Stat(int(info["size"]), next(versions, ""))


def _is_file(info: dict[str, Any]) -> bool:
    return info.get("type") == "file"


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part in SKIPPED_FOLDERS for part in Path(name).parts)


@contextmanager
def _storage_errors(path: str, *, missing: bool = False) -> Iterator[None]:
    """Converts the exceptions of a storage, which has its own types, into a `StorageError`.

    Args:
        path: for the message.
        missing: whether to convert `FileNotFoundError`, too.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not missing:
            raise
        why = f"{path} cannot be read: {type(error).__name__}: {error}"
        remedy = "check the address, the network and the credentials, then run again"
        raise StorageError(f"{why}\n  try: {remedy}") from None


@cache
def _protocol(protocol: str) -> Any:
    import fsspec  # noqa: PLC0415 - local corpora do not need it

    try:
        return fsspec.filesystem(protocol, use_listings_cache=False)  # sizes must be current
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{protocol}:// URLs cannot be opened: {error}\n  try: check the URL, and install the fsspec package for it"
        ) from None


def _filesystem(path: str) -> tuple[Any, str]:
    filesystem = _protocol(path.split("://", 1)[0])
    return filesystem, filesystem._strip_protocol(path)
