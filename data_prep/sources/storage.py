"""Where input lies: local files, or anything `fsspec` opens (`s3://`, `hf://`, `gs://`, ...), named by its URL.

Everything that touches the bytes of an input goes through here. Outputs and job directories are local or shared paths:
they need renames that are whole or absent, which object stores do not have.
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
"""Of a corpus, read no more than hidden ones are."""
_SIGN = re.compile(r"[*?\[]")  # that a path with it may be a pattern
_BLOCK_BYTES = 8 << 20  # of a remote file, per request
_MARKS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified")
"""By which the kinds of storage tell one content of a file from another."""


@dataclass(frozen=True, slots=True)
class Stat:
    """One state of a file. bytes: its size as stored; version: `MARK=VALUE`, or empty where the storage has no mark."""

    bytes: int
    version: str

    def is_another(self, before: Stat) -> bool:
        """Whether the file has been changed since."""
        marks = [stat.version.partition("=")[0] for stat in (self, before)]
        return self.bytes != before.bytes or (marks[0] == marks[1] and self.version != before.version)


class StorageError(DataError):
    """A remote file that cannot be opened or read, in the words of its storage."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A remote file of a listing.

    name: relative to what was listed; url, stat: of the file; named: by the address or its pattern itself, not found in
    a folder.
    """

    name: str
    url: str
    stat: Stat
    named: bool


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def stat(path: str) -> Stat:
    """Size and version of a file.

    Raises:
        FileNotFoundError: there is none.
    """
    if not is_remote(path):
        found = os.stat(path)  # noqa: PTH116 - called for a million files
        return Stat(found.st_size, f"mtime={found.st_mtime_ns}")
    with _told(path):
        filesystem, inner = _filesystem(path)
        return _stat(filesystem.info(inner))


def open_raw(path: str) -> BinaryIO:
    """Opens a file for reading, unbuffered where it is local; it can seek.

    Raises:
        OSError: of a local file. StorageError: whatever goes wrong with a remote one, now or when it is read.
    """
    if not is_remote(path):
        return cast(BinaryIO, io.FileIO(path))
    with _told(path, missing=True):
        filesystem, inner = _filesystem(path)
        return cast(BinaryIO, _Remote(filesystem.open(inner, "rb", block_size=_BLOCK_BYTES), path))


class _Remote(io.RawIOBase):
    """A remote file whose storage's own kinds of errors are told as a `StorageError`."""

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
        with _told(self._url, missing=True):
            return cast(bytes, self._file.read(size))

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with _told(self._url, missing=True):
            return int(self._file.readinto(buffer))

    def close(self) -> None:
        self._file.close()
        super().close()


def listing(path: str) -> list[Listed]:
    """All files that a URL names: itself, everything below it, or what its pattern matches and what is below that.

    A file or folder of the very name comes first: `data[1].jsonl` is a pattern only where there is none.

    Returns:
        the files, sorted by name. Hidden files and folders are left out, and `SKIPPED_FOLDERS`.

    Raises:
        StorageError: the place cannot be reached. DataError: the package for it is missing.
    """
    with _told(path, missing=True):
        filesystem, inner = _filesystem(path)
        if _SIGN.search(inner) and not _is_there(filesystem, inner):
            root = inner[: _SIGN.search(inner).start()].rpartition("/")[0]  # type: ignore[union-attr]
            named, inside = _matching(filesystem, inner)
        else:
            found = filesystem.find(inner, detail=True)
            itself = list(found) == [inner]
            root = inner.rpartition("/")[0] if itself else inner.rstrip("/")
            named, inside = (found, {}) if itself else ({}, found)
        listed = [
            Listed(name[len(root) :].lstrip("/"), filesystem.unstrip_protocol(name), _stat(info), name in named)
            for name, info in (inside | named).items()
            if _is_file(info)
        ]
    return sorted((entry for entry in listed if not _hidden(entry.name)), key=lambda entry: entry.name)


def _matching(filesystem: Any, pattern: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a pattern matches, and what is in the folders that it matches."""
    named = filesystem.glob(pattern, detail=True)
    inside: dict[str, Any] = {}
    last = None
    for folder in sorted(f"{name}/" for name, info in named.items() if not _is_file(info)):
        if last is None or not folder.startswith(last):
            last = folder
            inside |= filesystem.find(folder.rstrip("/"), detail=True)
    return named, inside


def _is_there(filesystem: Any, name: str) -> bool:
    try:
        return bool(filesystem.exists(name))
    except Exception:  # a name that a storage refuses, such as a bucket with a star in it, is none
        return False


def parquet_source(path: str) -> Any:
    """What pyarrow opens: a path, which it maps, or an open remote file."""
    return open_raw(path) if is_remote(path) else path


def _stat(info: dict[str, Any]) -> Stat:
    marks = (f"{key}={info[key]}" for key in _MARKS if info.get(key))
    return Stat(int(info["size"]), next(marks, ""))


def _is_file(info: dict[str, Any]) -> bool:
    return info.get("type") == "file"


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part in SKIPPED_FOLDERS for part in Path(name).parts)


@contextmanager
def _told(path: str, *, missing: bool = False) -> Iterator[None]:
    """Turns what a storage raises, of which each has its own kinds, into a `StorageError`.

    Args:
        missing: also a `FileNotFoundError`.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not missing:
            raise
        words = f"{path} cannot be read: {type(error).__name__}: {error}"
        remedy = "check the address, the network and the credentials, then run again"
        raise StorageError(f"{words}\n  try: {remedy}") from None


@cache
def _protocol(protocol: str) -> Any:
    import fsspec  # noqa: PLC0415 - local corpora do not need it

    try:
        return fsspec.filesystem(protocol, use_listings_cache=False)  # sizes must be those of this moment
    except (ImportError, ValueError) as error:
        raise DataError(f"{protocol}:// cannot be opened: {error}") from None


def _filesystem(path: str) -> tuple[Any, str]:
    filesystem = _protocol(path.split("://", 1)[0])
    return filesystem, filesystem._strip_protocol(path)
