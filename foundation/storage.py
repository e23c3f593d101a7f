"""Object stores: only this module reads and writes URLs (`s3://`, `gs://`, `az://`, `hf://`, ...).

`fsspec` opens them, with the credentials and endpoints of the user's own tools (AWS_PROFILE, AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, ...). An object is complete or absent: it appears when its last byte has arrived. A
directory is a prefix of names; see `remote_directory` and `remote_publish`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from foundation.errors import DataError, HeadraceError

T = TypeVar("T")
AT_ONCE = 64
"""Number of ranges read at a time: a store answers each after tens of milliseconds, but many at once."""
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified")
"""Keys of an object's metadata that distinguish its versions in the stores."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Size and version of a file or an object.

    Attributes:
        bytes: size as stored, in bytes.
        version: `KEY=VALUE` from the store's metadata, or empty if it has none.
    """

    bytes: int
    version: str

    def differs_from(self, before: Stat) -> bool:
        """Whether the object was changed since `before`: another size, or another value of the same version key."""
        keys = [stat.version.partition("=")[0] for stat in (self, before)]
        return self.bytes != before.bytes or (keys[0] == keys[1] and self.version != before.version)


class StorageError(DataError):
    """An object cannot be opened, read or written; the message contains the store's own error.

    Attributes:
        lasting: whether a retry cannot help, because the object is missing or access is not allowed.
        unreachable: whether nothing answers at the address, after the store's package has tried for seconds.
    """

    lasting = unreachable = False


_RETRIES_S = (1.0, 3.0, 9.0)
_UNREACHABLE = ("EndpointConnectionError", "ClientConnectorError", "ClientConnectorDNSError", "ServiceRequestError")
"""Names of the exceptions of botocore, aiohttp and azure-core when no connection is made."""


def patiently(act: Callable[[], T]) -> T:
    """Calls a function, and again after 1, 3 and 9 s if a store fails, besides the store package's own retries.

    Raises:
        StorageError: the function has failed four times, twice without an answer, or for a lasting reason.
    """
    for pause_s in _RETRIES_S:
        try:
            return act()
        except StorageError as error:
            if error.lasting or (error.unreachable and pause_s != _RETRIES_S[0]):
                raise
            time.sleep(pause_s)
    return act()


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def filesystem(url: str) -> tuple[Any, str]:
    """The `fsspec` file system for a URL, and the URL's path in it.

    Raises:
        DataError: the package for the protocol is missing.
    """
    found = _protocol(url.split("://", 1)[0])
    return found, found._strip_protocol(url)


@contextmanager
def storage_errors(url: str, *, doing: str = "read", missing: bool = True) -> Iterator[None]:
    """Converts a store's exceptions, which have their own types, into a `StorageError`.

    Args:
        url: URL that the message names.
        doing: failed operation, as a participle for the message, e.g. "written".
        missing: whether to convert `FileNotFoundError` as well.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not missing:
            raise
        why = f"{url} cannot be {doing}: {type(error).__name__}: {error}"
        remedy = "check the address, the network and the credentials, then run again"
        found = StorageError(f"{why}\n  try: {remedy}")
        found.lasting = isinstance(error, FileNotFoundError | PermissionError) or "Credentials" in type(error).__name__
        found.unreachable = type(error).__name__ in _UNREACHABLE
        raise found from None


def stat_of(info: dict[str, Any]) -> Stat:
    """The size and version in an object's metadata, as `fsspec` returns it."""
    versions = (f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key))
    return Stat(int(info["size"]), next(versions, ""))


def objects_below(url: str) -> dict[str, Stat]:
    """Lists all objects below a URL: name relative to the URL -> size and version; empty if there are none.

    Raises:
        StorageError: the store cannot be reached.
    """
    with storage_errors(url, doing="listed"):
        files, inner = filesystem(url)
        root = inner.rstrip("/") + "/"
        found = files.find(inner, detail=True)
        return {name.removeprefix(root): stat_of(each) for name, each in found.items() if name.startswith(root)}


def stat_object(url: str) -> Stat:
    """Reads the size and version of an object.

    Raises:
        StorageError: the object does not exist, or the store cannot be reached.
    """
    with storage_errors(url):
        files, inner = filesystem(url)
        return stat_of(files.info(inner))


def same_object(url: str, *, size: int, sha256: str) -> bool:
    """Whether there is an object with this content; reads it if its size matches.

    Args:
        url: URL of the object.
        size: size of the content, in bytes.
        sha256: SHA-256 of the content, in hexadecimal.

    Raises:
        StorageError: the store cannot be read.
    """
    with storage_errors(url):
        files, inner = filesystem(url)
        try:
            if int(files.info(inner)["size"]) != size:
                return False
            with files.open(inner, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == sha256
        except FileNotFoundError:
            return False


def read_object(url: str) -> bytes:
    """Reads the bytes of a small object.

    Raises:
        FileNotFoundError: the object does not exist.
        StorageError: any other error.
    """
    with storage_errors(url, missing=False):
        files, inner = filesystem(url)
        return cast(bytes, files.cat_file(inner))


def read_file(path: str) -> bytes:
    """Reads the bytes of a small file or object; raises the errors of `read_object`, or OSError."""
    return read_object(path) if is_remote(path) else Path(path).read_bytes()


def read_range(url: str, start: int, size: int) -> bytes:
    """Reads a range of an object's bytes; fewer if the object ends earlier.

    Raises:
        StorageError: the object does not exist, or any other error.
    """
    with storage_errors(url):
        files, inner = filesystem(url)
        return cast(bytes, files.cat_file(inner, start=start, end=start + size))


def read_ranges(ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Reads ranges of several objects, `AT_ONCE` at a time; see `read_range`.

    Args:
        ranges: URL of each range, its start and its size in bytes.

    Raises:
        StorageError: a range could not be read; the error of the first such range is raised.
    """
    found: dict[int, bytes] = {}
    protocols = [url.partition("://")[0] for url, _, _ in ranges]
    for protocol in dict.fromkeys(protocols):
        mine = [number for number, own in enumerate(protocols) if own == protocol]
        files = _protocol(protocol)
        inner, starts, sizes = zip(*(_inner(files, ranges[number]) for number in mine), strict=True)
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        read = files.cat_ranges([*inner], [*starts], ends, on_error="return", batch_size=AT_ONCE)
        for number, data in zip(mine, read, strict=True):
            with storage_errors(ranges[number][0]):
                if isinstance(data, Exception):
                    raise data
            found[number] = data
    return [found[number] for number in range(len(ranges))]


def _inner(files: Any, span: tuple[str, int, int]) -> tuple[str, int, int]:
    url, start, size = span
    return files._strip_protocol(url), start, size


def download(url: str, path: Path) -> None:
    """Writes the bytes of an object to a file.

    Raises:
        StorageError: the download failed; a part of the file may exist.
    """
    with storage_errors(url):
        files, inner = filesystem(url)
        files.get_file(inner, str(path))


def upload(path: Path, url: str, *, progress: Callable[[int], None] = lambda _bytes: None) -> None:
    """Writes a file as an object; replaces an existing one.

    Args:
        path: path of the file.
        url: URL of the object.
        progress: function called with the bytes of each sent part, again if a part is sent again.

    Raises:
        StorageError: the upload failed; the object may exist or not.
    """
    with storage_errors(url, doing="written"):
        from fsspec.callbacks import Callback  # noqa: PLC0415 - local runs do not need it

        class Sent(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                progress(inc)

            def absolute_update(self, value: int) -> None:  # for adlfs, which reports the size of each block
                progress(value)

        files, inner = filesystem(url)
        files.put_file(str(path), inner, callback=Sent())


def put_object(url: str, data: bytes) -> None:
    """Writes a small object; replaces an existing one.

    Raises:
        StorageError: the write failed; the object may exist or not.
    """
    with storage_errors(url, doing="written"):
        files, inner = filesystem(url)
        files.pipe_file(inner, data)


def put_if_absent(url: str, data: bytes) -> bool:
    """Writes a small object unless one exists; returns whether the object has these bytes.

    Of several writers of different bytes, one gets true. A store may write the object and lose its answer: asked again,
    it says that the object exists. So an object with the same bytes counts as written.

    Raises:
        StorageError: the store cannot be written to.
    """
    with storage_errors(url, doing="written"):
        files, inner = filesystem(url)
        try:
            files.pipe_file(inner, data, mode="create")
        except FileExistsError:
            return bool(files.cat_file(inner) == data)
    return True


def delete(url: str) -> None:
    """Deletes an object, which may be absent.

    Raises:
        StorageError: the store does not allow deletion.
    """
    with storage_errors(url, doing="deleted"):
        files, inner = filesystem(url)
        with suppress(FileNotFoundError):
            files.rm_file(inner)


def _protocol(protocol: str) -> Any:
    import fsspec  # noqa: PLC0415 - local runs do not need it

    options: dict[str, Any] = {"use_listings_cache": False}  # sizes must be current
    if protocol == "s3" and "config_kwargs" not in fsspec.config.conf.get("s3", {}):
        options["config_kwargs"] = {"max_pool_connections": AT_ONCE}  # botocore's default is 10
    try:
        return fsspec.filesystem(protocol, **options)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{protocol}:// URLs cannot be opened: {error}\n  try: check the URL, and install the fsspec package for it"
        ) from None
