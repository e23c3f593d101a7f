"""Finished directories in an object store: their manifests, and copies of them on this host.

Readers trust only manifests, which `remote_publish` writes last. `fetch` copies such a directory to a disk and compares
every checksum; `cached` copies a part of it to a cache on this host.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from foundation.directory import (
    MANIFEST,
    Manifest,
    free_bytes,
    inner_manifest,
    parse_manifest,
    read_manifest,
    sha256_of_file,
    staged,
    sync,
)
from foundation.errors import DataError
from foundation.lock import lock_file
from foundation.paths import is_store_url
from foundation.storage import (
    download,
    objects_below,
    patiently,
    read_object,
    same_object,
)

CACHE = "HEADRACE_CACHE"
"""Environment variable with the directory for copies from object stores on this host."""
_AT_ONCE = 8
"""Number of objects written or read at the same time."""
Progress = Callable[[int], None]
"""Function called with the size in bytes of each copied file."""


def remote_manifest(url: str) -> Manifest:
    """Reads the manifest of a finished directory in an object store.

    Raises:
        DataError: the manifest is missing or damaged.
        StorageError: the store cannot be read.
    """
    return read_remote_manifest(url)[1]


def manifest_of(place: str, *, kind: str) -> Manifest:
    """Reads the manifest of a finished directory on a disk or in an object store.

    Raises:
        DataError: the manifest is missing, damaged, or of another kind.
        StorageError: the store cannot be read.
    """
    if not is_store_url(place):
        return read_manifest(place, kind=kind)
    manifest = patiently(partial(remote_manifest, place))
    if manifest.kind != kind:
        raise DataError(f"{place} holds a '{manifest.kind}', but a '{kind}' is needed\n  try: check the address")
    return manifest


def find_manifest(url: str) -> Manifest | None:
    """Reads the manifest of a finished directory in an object store; None without one.

    Raises:
        DataError: the manifest is damaged.
        StorageError: the store cannot be read.
    """
    found = _manifest(url)
    return None if found is None else found[1]


def _manifest(url: str) -> tuple[bytes, Manifest] | None:
    path = f"{url.rstrip('/')}/{MANIFEST}"
    try:
        text = read_object(path)
    except FileNotFoundError:
        return None
    return text, parse_manifest(text, path=path)


def read_remote_manifest(url: str) -> tuple[bytes, Manifest]:
    """Reads a manifest; returns its bytes and their content (see `remote_manifest`)."""
    if (manifest := _manifest(url)) is not None:
        return manifest
    objects = len(objects_below(url))
    found = f"there are {objects} objects and no {MANIFEST}" if objects else "no object has this prefix"
    remedy = "copy it there again" if objects else "check the address"
    raise DataError(f"{url} is no finished directory: {found}\n  try: {remedy}")


def local_manifest(directory: Path) -> tuple[bytes, Manifest]:
    """Reads the manifest of a finished directory on a disk, of any kind; returns its bytes and their content.

    Raises:
        DataError: the manifest is missing or damaged.
    """
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
    except OSError:
        what = (
            f"has no {MANIFEST}: it was not finished, or not made by headrace" if directory.exists() else "is missing"
        )
        raise DataError(f"{directory} {what}\n  try: the path of a finished directory") from None
    return text, parse_manifest(text, path=str(path))


def is_copied(name: str) -> bool:
    """Whether a file is copied with its directory: it is neither hidden nor the directory's own manifest."""
    return name != MANIFEST and not is_hidden(name)


def is_hidden(name: str) -> bool:
    """Whether a relative path is hidden, or leads out of its directory, as an object's name may."""
    return any(part.startswith((".", "/")) for part in PurePosixPath(name).parts)


def is_manifest(name: str) -> bool:
    """Whether a file's name is that of a directory's manifest."""
    return PurePosixPath(name).name == MANIFEST


def fetch(
    url: str,
    final: Path,
    *,
    progress: Progress = lambda _bytes: None,
    wanted: Callable[[str], bool] = lambda _name: True,
    found: tuple[bytes, Manifest] | None = None,
    beside: bool = False,
) -> Manifest:
    """Copies a finished directory of an object store to a disk, whole or not at all.

    Args:
        url: URL of the directory.
        final: path of the copy, which must not exist.
        progress: function called with the bytes of each copied file.
        wanted: function that decides by name whether a file is copied; the manifest lists all files.
        found: the manifest's bytes and content, if already read (see `read_remote_manifest`); None reads them.
        beside: whether to copy files that the manifest does not list, too.

    Returns:
        The directory's manifest, with every file that may be copied.

    Raises:
        DataError: `final` exists, the disk has no room, there is no finished directory, or a checksum differs.
        StorageError: the store cannot be read.
    """
    refuse_existing(final)
    text, manifest = found or read_remote_manifest(url)
    if beside:
        manifest = replace(manifest, files={**files_beside(url), **manifest.files})
    files = {name: entry for name, entry in manifest.files.items() if wanted(name)}
    require_room(sum(int(entry["bytes"]) for entry in files.values()), final)
    with staged(final) as staging:
        fetch_files(url, files, staging, progress=progress)
        give_name(staging, final, text)
    return manifest


def refuse_existing(final: Path) -> None:
    """Raises DataError if the name for a directory's copy already exists."""
    if final.exists():
        raise DataError(f"{final} exists already\n  try: remove it, or choose another path")


def files_beside(url: str, *, wanted: Callable[[str], bool] = lambda _name: True) -> dict[str, dict[str, Any]]:
    """Lists the files below a URL: sizes, and checksums of files in finished directories further below.

    Args:
        url: URL of a finished directory.
        wanted: function that decides by name whether a file is listed; manifests that are not listed are not read.

    Raises:
        DataError: a manifest there is damaged.
        StorageError: the store cannot be read.
    """
    objects = {name: stat for name, stat in objects_below(url).items() if is_copied(name) and wanted(name)}
    found: dict[str, dict[str, Any]] = {name: {"bytes": stat.bytes} for name, stat in objects.items()}
    for name in [name for name in found if is_manifest(name)]:
        folder, path = PurePosixPath(name).parent, f"{url.rstrip('/')}/{name}"
        inner = inner_manifest(read_object(path), path=path)
        found |= {f"{folder}/{n}": entry for n, entry in (inner.files if inner else {}).items()}
    return found


def fetch_files(
    url: str,
    files: Mapping[str, Mapping[str, Any]],
    staging: Path,
    *,
    progress: Progress = lambda _bytes: None,
) -> None:
    """Copies files below a URL to a staging directory, and flushes them.

    Args:
        url: URL of the directory.
        files: name of each file -> its `bytes`, and its `sha256` if a manifest lists it.
        staging: the staging directory, which exists.
        progress: function called with the bytes of each copied file.

    Raises:
        DataError: a checksum or a size differs.
        StorageError: the store cannot be read.
    """
    for folder in {PurePosixPath(name).parent for name in files}:
        (staging / folder).mkdir(parents=True, exist_ok=True)

    def receive(name: str) -> None:
        entry, path, source = files[name], staging / name, f"{url.rstrip('/')}/{name}"
        download(source, path)
        listed = "sha256" in entry
        if (sha256_of_file(path) != entry["sha256"]) if listed else (path.stat().st_size != entry["bytes"]):
            than = f"checksum than {MANIFEST} says" if listed else "size than the store lists"
            why = f"has another {than}: it was damaged or overwritten, there or on the way"
            raise DataError(f"{source} {why}\n  try: again; if it stays so, write {url} again")
        sync(path)
        progress(int(entry["bytes"]))

    for_each(receive, files)


def give_name(staging: Path, final: Path, text: bytes) -> None:
    """Turns fetched files into a finished directory: writes the manifest, flushes, and renames.

    Args:
        staging: directory with all wanted files.
        final: path of the finished directory, which does not exist.
        text: bytes of the manifest.
    """
    (staging / MANIFEST).write_bytes(text)
    sync(staging / MANIFEST)
    sync(staging)
    staging.rename(final)
    sync(final.parent)


def verify_remote(url: str, manifest: Manifest) -> Iterator[tuple[str, bool]]:
    """Reads every file of a finished directory in an object store; yields (name, whether its SHA-256 is as listed).

    Raises:
        StorageError: the store cannot be read.
    """
    for name, entry in manifest.files.items():
        same = partial(same_object, f"{url.rstrip('/')}/{name}", size=entry["bytes"], sha256=entry["sha256"])
        yield name, patiently(same)


def cached(url: str, *, wanted: Callable[[str], bool], found: tuple[bytes, Manifest] | None = None) -> Path:
    """Copies a part of an object store's finished directory to this host's cache, once, by one process.

    Args:
        url: URL of the directory.
        wanted: function that decides by name whether a file is copied; always the same for one URL.
        found: the manifest's bytes and content, if already read (see `read_remote_manifest`); None reads them.

    Returns:
        The directory, whose manifest lists all files. It is below HEADRACE_CACHE, by default ~/.cache/headrace.

    Raises:
        DataError: the disk has no room, there is no finished directory, or a checksum differs.
        StorageError: the store cannot be read.
    """
    manifest = found or read_remote_manifest(url)
    return made_once(url, manifest[1].fingerprint, lambda final: fetch(url, final, wanted=wanted, found=manifest))


def made_once(url: str, fingerprint: str, make: Callable[[Path], object]) -> Path:
    """Makes a copy in this host's cache; one process makes it while others wait.

    Args:
        url: URL of the original.
        fingerprint: hash of the original's current content; other content gets another copy.
        make: function that makes the directory at a given path, completely or not at all.
    """
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"{PurePosixPath(url).name}-{fingerprint[:16]}"
    with lock_file(root / f".{final.name}.lock", doing=f"copying {url} to {root}", timeout_s=math.inf):
        if not final.is_dir():
            make(final)
    return final


def cache_root() -> Path:
    """HEADRACE_CACHE, by default ~/.cache/headrace; it need not exist."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache/headrace")


def require_room(needed: int, final: Path) -> None:
    """Raises DataError, with both numbers, if the disk of a path has no room for `needed` bytes."""
    free = free_bytes(final.parent)
    if needed > free:
        text = f"{final} needs {needed / 1e9:,.2f} GB, and {free / 1e9:,.2f} GB are free there"
        raise DataError(f"{text}; nothing was copied\n  try: a path on a larger disk")


def for_each(act: Callable[[str], object], names: Iterable[str]) -> None:
    """Calls a function for several names at once; the first error ends the calls and is raised."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = [pool.submit(partial(act, name)) for name in names]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
