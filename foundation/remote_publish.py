"""Publishes a finished directory to an object store, complete or absent as on a disk: the manifest is written last.

`publish` uploads all files of a finished directory, even those missing from its manifest (a card, a packed index).
It compares the store's listing with the sent files, and then writes the manifest unless there is one: only one of
several writers succeeds. Readers (`remote_directory`) trust only manifests. A process killed at any time leaves no
manifest, or a complete directory. The next `publish` replaces files without a manifest; until then the store charges
for them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foundation.directory import (
    MANIFEST,
    check_sizes,
    inner_manifest,
)
from foundation.errors import DataError
from foundation.remote_directory import (
    Progress,
    find_manifest,
    for_each,
    is_copied,
    is_manifest,
    local_manifest,
)
from foundation.storage import (
    StorageError,
    delete,
    objects_below,
    put_if_absent,
    read_object,
    stat_object,
    upload,
)

_PROBE = ".headrace-probe-"


class NotArrivedError(DataError):
    """A store's listing differs from the files sent there."""


def check_can_publish(url: str) -> None:
    """Refuses a place where a directory cannot be written completely or not at all, before any work.

    Writes a small object and deletes it.

    Raises:
        DataError: there is a finished directory, or the store ignores conditions of conditional writes.
        StorageError: the store cannot be written to.
    """
    if find_manifest(url) is not None:
        raise taken(url)
    check_can_write(url)


def taken(url: str) -> DataError:
    """The error for a place that already has a finished directory."""
    return DataError(f"{url} exists already\n  try: delete it, or choose another place")


def check_can_write(url: str) -> None:
    """Refuses a place that does not allow listing, writing or deleting, or does not keep two writers apart.

    Writes a small object and deletes it; nothing is left if either is not allowed.

    Raises:
        DataError: the store ignores conditions of conditional writes.
        StorageError: an operation is not allowed, or the store cannot be reached.
    """
    probe = f"{url.rstrip('/')}/{_PROBE}{uuid.uuid4().hex[:12]}"
    objects_below(probe)
    try:
        delete(probe)  # it does not exist: without permission to delete, nothing must be written
    except StorageError as error:
        if not error.lasting:
            raise
        why = str(error).splitlines()[0].partition("cannot be deleted: ")[2]
        error.args = (
            f"{url}: the credentials do not allow writing and deleting there: {why}\n"
            "  try: credentials that may list, read, write and delete objects below it",
        )
        raise
    try:
        written = put_if_absent(probe, b"1"), put_if_absent(probe, b"2")
    except StorageError:
        with suppress(StorageError):  # the error of writing says more
            delete(probe)
        raise
    delete(probe)
    if written != (True, False):
        why = "the store overwrites an object despite If-None-Match: two writers would mix their files"
        raise DataError(f"{url}: {why}\n  try: a store with conditional writes, such as S3, GCS, Azure or MinIO")


def remove_probes(url: str) -> None:
    """Deletes the probes of processes killed in `check_can_write` from a finished directory."""
    with suppress(StorageError):  # a probe is one byte
        for name in objects_below(url):
            if name.startswith(_PROBE):
                delete(f"{url.rstrip('/')}/{name}")


def publish(
    directory: Path,
    url: str,
    *,
    uploaded: Collection[str] = (),
    progress: Progress = lambda _bytes: None,
    sent: Progress = lambda _bytes: None,
    trying: Callable[[Callable[[], Any]], Any] = lambda act: act(),
    beside: Callable[[str], bool] = lambda _name: True,
) -> dict[str, int]:
    """Writes a finished directory to an object store; see the module's docstring.

    Args:
        directory: a directory that `commit` has finished; its sizes are compared with its manifest.
        url: URL of the new directory, which has no `MANIFEST` (see `check_can_publish`).
        uploaded: names of files in the manifest that the store has but the directory lacks.
        progress: function called with the bytes of each sent file.
        sent: function called with the bytes of each sent part of a file.
        trying: function that runs one request to the store, and may repeat it on failure.
        beside: function that decides by name whether an unlisted file is copied; hidden files never are.

    Returns:
        The bytes of every sent file, without the manifest.

    Raises:
        DataError: the directory is not finished, another process has written one there first, or the store's listing
            differs from the sent files.
        StorageError: the store cannot be written to; there is no manifest there, and a repetition is safe.
    """
    place = url.rstrip("/")
    text, manifest = local_manifest(directory)
    files = {name: entry for name, entry in manifest.files.items() if name not in uploaded}
    check_sizes(directory, replace(manifest, files=files))
    unlisted = {name: size for name, size in sizes_below(directory).items() if name not in manifest.files}
    sizes = {name: int(entry["bytes"]) for name, entry in files.items()}
    sizes |= {name: size for name, size in unlisted.items() if beside(name)}

    inner = {}  # manifests of finished directories within this one
    for path in (directory / name for name in sizes if is_manifest(name)):
        if (found := inner_manifest(path.read_bytes(), path=str(path))) is not None:
            check_sizes(path.parent, found)
            inner[str(path.relative_to(directory))] = path.stat().st_size
    for part in ({name: size for name, size in sizes.items() if name not in inner}, inner):
        send_files(directory, place, part, progress=progress, sent=sent, trying=trying)
    taken = trying(partial(_exists, f"{place}/{MANIFEST}"))
    if taken or not trying(partial(put_if_absent, f"{place}/{MANIFEST}", text)):
        raise DataError(f"{url}: another process has written a directory there meanwhile\n  try: choose another place")
    return sizes


def send_files(
    directory: Path,
    url: str,
    sizes: Mapping[str, int],
    *,
    progress: Progress = lambda _bytes: None,
    sent: Progress = lambda _bytes: None,
    trying: Callable[[Callable[[], Any]], Any] = lambda act: act(),
) -> None:
    """Writes files of a directory to an object store, and compares the store's listing with the sent files.

    Args:
        directory: the directory.
        url: URL of the directory in the store, without a final slash.
        sizes: relative path -> bytes.
        progress, sent, trying: The arguments of `publish`.

    Raises:
        NotArrivedError: the store lacks a file, or lists it with another size.
        StorageError: the store cannot be written to or listed.
    """

    def send(name: str) -> None:
        trying(partial(upload, directory / name, f"{url}/{name}", progress=sent))
        progress(sizes[name])

    for_each(send, sizes)
    if sizes:
        trying(partial(check_arrived, url, sizes))


def sizes_below(directory: Path) -> dict[str, int]:
    """The bytes of all files of a directory, by relative path, except hidden files and its own manifest."""
    files = {path.relative_to(directory): path for path in sorted(directory.rglob("*")) if path.is_file()}
    return {str(name): path.stat().st_size for name, path in files.items() if is_copied(str(name))}


def check_arrived(url: str, sizes: Mapping[str, int]) -> None:
    """Compares a store's listing below a URL with the sent files, before anything is deleted here.

    Args:
        url: URL of a directory, or of one object.
        sizes: relative path -> bytes; the path of one object is empty.

    Raises:
        NotArrivedError: the store lacks a file, or lists it with another size.
        StorageError: the store cannot be listed.
    """
    there = {"": stat_object(url)} if "" in sizes else objects_below(url)
    for name, size in sizes.items():
        if (found := there.get(name)) is None or found.bytes != size:
            what = "is not there" if found is None else f"has {found.bytes:,} bytes there"
            remedy = "again, when no other process writes or deletes there"
            where = f"{url}/{name}".rstrip("/")
            raise NotArrivedError(f"{where} was sent with {size:,} bytes, and {what}\n  try: {remedy}")


def _exists(url: str) -> bool:
    try:
        read_object(url)
    except FileNotFoundError:
        return False
    return True
