"""Where input lies: local files, or anything `fsspec` opens (`s3://`, `hf://`, `gs://`, ...), named by its URL.

Everything that touches the bytes of an input goes through here. Outputs and job directories are local or shared paths:
they need renames that are whole or absent, which object stores do not have.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from headrace.errors import DataError

_BLOCK_BYTES = 8 << 20  # of a remote file, per request


_MARKS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified")
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
    filesystem, inner = _filesystem(path)
    return _stat(filesystem.info(inner))


def open_raw(path: str) -> BinaryIO:
    """Opens a file for reading, unbuffered where it is local; it can seek."""
    if not is_remote(path):
        return cast(BinaryIO, io.FileIO(path))
    filesystem, inner = _filesystem(path)
    return cast(BinaryIO, filesystem.open(inner, "rb", block_size=_BLOCK_BYTES))


def listing(path: str) -> list[tuple[str, str, Stat]]:
    """All files that a URL names: itself, everything below it, or what its pattern matches.

    Returns:
        (name, URL, state) of each, sorted by name. Hidden files and folders are left out.

    Raises:
        DataError: the place cannot be reached, or the package for it is missing.
    """
    try:
        filesystem, inner = _filesystem(path)
        if any(sign in inner for sign in "*?["):
            found = filesystem.glob(inner, detail=True)
            root = inner.split("*", 1)[0].rsplit("/", 1)[0]
        else:
            found = filesystem.find(inner, detail=True)
            root = inner.rstrip("/") if list(found) != [inner] else inner.rsplit("/", 1)[0]
    except Exception as error:  # each protocol has its own kinds
        words = f"{path} cannot be listed: {type(error).__name__}: {error}"
        raise DataError(f"{words}\n  try: check the address, the network and the credentials") from None
    files = [(name[len(root) :].lstrip("/"), name, _stat(info)) for name, info in found.items() if _is_file(info)]
    shown = [(n, filesystem.unstrip_protocol(f), stat) for n, f, stat in files if not _hidden(n)]
    return sorted(shown, key=lambda entry: entry[0])


def parquet_source(path: str) -> Any:
    """What pyarrow opens: a path, which it maps, or an open remote file."""
    return open_raw(path) if is_remote(path) else path


def _stat(info: dict[str, Any]) -> Stat:
    marks = (f"{key}={info[key]}" for key in _MARKS if info.get(key))
    return Stat(int(info["size"]), next(marks, ""))


def _is_file(info: dict[str, Any]) -> bool:
    return info.get("type") == "file"


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


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
