"""Runs whose directory is in an object store: the place of their files on this host, and how they get there.

    s3://bucket/run/                          on this host: HEADRACE_CACHE/runs/run-0123456789abcdef/
        metrics.jsonl, manifest.json, ...         metrics.jsonl, manifest.json, ...
        checkpoints/step-00000400.3/              checkpoints/step-00000400/
        .lease/00000003                           uploads.json, .bucket.json

A training process works in the directory on its host, and a separate process copies finished files to the store
(`pipeline.run.uploads`). The store's files count, except on the host that wrote last: its directory is newer. The lease
says which host that is (`foundation.lease`); `.bucket.json` has the token of a host's own lease.

The number after a checkpoint's name is the number of the lease under which it was written. A process that was paused,
and whose lease another has taken over meanwhile, cannot write into the other's directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from foundation.directory import MANIFEST, staged, whole_file, write_json
from foundation.errors import DataError
from foundation.lease import Lease, newest_lease
from foundation.lock import is_locked, lock_file
from foundation.paths import is_url
from foundation.remote_directory import (
    cache_root,
    fetch_files,
    give_name,
    is_hidden,
    read_remote_manifest,
    require_room,
)
from foundation.storage import Stat, download, objects_below, patiently

CHECKPOINTS, RUN_LOCK, UPLOADS = "checkpoints", ".lock", "uploads.json"
"""Names in a run's directory; the last file has the newest lease, including its holder's status."""
_RECORD = ".bucket.json"
_NAME = re.compile(r"step-(\d+)((?:\.\d+)*)")


@dataclass(frozen=True, order=True)
class RemoteCheckpoint:
    """A finished checkpoint in an object store.

    Attributes:
        step: last step in the checkpoint.
        numbers: number of the lease it was written under, and 2, 3, ... if that lease wrote it again; later ones are
            larger.
        url: URL of the checkpoint's directory.
    """

    step: int
    numbers: tuple[int, ...]
    url: str


@dataclass(frozen=True)
class _StoreRecord:
    """A run directory's record of its store, on this host.

    Attributes:
        url: URL of the run.
        tokens: tokens of leases taken on this host: while one of these leases counts, this directory is newer than the
            store.
        versions: name -> size and version of the small objects copied from the store.
    """

    url: str
    tokens: tuple[str, ...] = ()
    versions: Mapping[str, tuple[int, str]] = field(default_factory=dict)


def working_directory(place: str) -> Path:
    """The directory of a run on this host: the path itself, or for a URL a directory below HEADRACE_CACHE."""
    if not is_url(place):
        return Path(place)
    url = place.rstrip("/")
    return cache_root() / "runs" / f"{PurePosixPath(url).name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def url_of(run_dir: Path) -> str | None:
    """The URL of a run, given its directory on this host; None for a run on a file system."""
    return record.url if (record := _read(run_dir)) is not None else None


def remote_checkpoints(url: str) -> list[RemoteCheckpoint]:
    """The finished checkpoints of a run in an object store, newest first.

    Raises:
        StorageError: the store cannot be listed.
    """
    return _checkpoints(url, patiently(partial(objects_below, f"{url}/{CHECKPOINTS}")))


def up_to_date(place: str) -> Path:
    """The directory of a run on this host, brought up to date for a URL; the run need not have begun.

    Raises:
        DataError: a run was trained here, and the store has nothing from it.
        StorageError: the store cannot be read.
    """
    return pull(place) if is_url(place) else Path(place)


def local_run(place: str) -> Path:
    """The directory on this host of a run or a checkpoint, copied from a URL; a path is returned unchanged.

    All changed files of the run are copied, but no checkpoint other than the named one.

    Args:
        place: a path, or the URL of a run, of a checkpoint or of `latest` there.

    Raises:
        DataError: there is no run at that URL, or no such checkpoint.
        StorageError: the store cannot be read.
    """
    if not is_url(place):
        return Path(place)
    url, separator, name = place.rstrip("/").rpartition(f"/{CHECKPOINTS}/")
    if not separator:
        url = place.rstrip("/")
    run_dir = pull(url)
    if url_of(run_dir) is None:
        raise DataError(f"{url}: no run has begun there\n  try: the URL that run.dir names in its config")
    if not separator:
        return run_dir
    found = [each for each in remote_checkpoints(url) if name == "latest" or PurePosixPath(each.url).name == name]
    if not found:
        found = [each for each in remote_checkpoints(url) if name == f"step-{each.step:08d}"]
    if not found:
        raise DataError(f"{place}: no finished checkpoint has this name\n  try: headrace checkpoint ls {url}")
    final = run_dir / CHECKPOINTS / f"step-{found[0].step:08d}"
    fetch_checkpoint(found[0].url, final)
    return final


def pull(url: str, *, locked: bool = False) -> Path:
    """Brings a run's directory on this host up to date unless it is newer than the store; copies no checkpoints.

    Then deletes checkpoints that the store lacks: another host has continued from an earlier one.

    Args:
        url: URL of the run.
        locked: whether this process holds the run's lock; else nothing is copied while another process holds it.

    Raises:
        DataError: a run was trained here, and the store has nothing from it.
        StorageError: the store cannot be read.
    """
    run_dir = working_directory(url)
    run_dir.mkdir(parents=True, exist_ok=True)
    with lock_file(run_dir.with_name(f".{run_dir.name}.lock"), doing=f"copying {url}", timeout_s=math.inf):
        if locked or not is_locked(run_dir / RUN_LOCK):
            patiently(partial(_pull, url, run_dir))
    return run_dir


def _pull(url: str, run_dir: Path) -> None:
    lease, record = newest_lease(url), _read(run_dir) or _StoreRecord(url)
    if lease is None and (run_dir / UPLOADS).exists():
        why = f"the store has nothing of this run any more, but this host still has its directory: {run_dir}"
        raise DataError(f"{url}: {why}\n  try: remove that directory to start over, or choose another URL")
    if lease is None or lease.token in record.tokens:
        return
    objects = objects_below(url)
    _drop_others(run_dir, _checkpoints(url, _below(objects, CHECKPOINTS)))
    versions = {name: (stat.bytes, stat.version) for name, stat in objects.items() if is_small_name(name)}
    for name in (name for name, version in versions.items() if record.versions.get(name) != version):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(run_dir / name) as path:
            download(f"{url}/{name}", path)
    write_json(run_dir / UPLOADS, asdict(lease))
    _write(run_dir, _StoreRecord(url, (), versions))


def claim(url: str, token: str) -> None:
    """Records that a lease is about to be taken on this host: its directory is then newer than the store."""
    run_dir = working_directory(url)
    record = _read(run_dir) or _StoreRecord(url)
    _write(run_dir, _StoreRecord(url, (*record.tokens[-1:], token)))


def is_own(url: str, lease: Lease) -> bool:
    """Whether a lease was taken for the directory on this host."""
    record = _read(working_directory(url))
    return record is not None and lease.token in record.tokens


def fetch_checkpoint(url: str, final: Path, *, progress: Callable[[int], None] = lambda _bytes: None) -> None:
    """Copies a checkpoint to this host, completely or not at all, unless it exists here.

    Args:
        url: URL of the checkpoint's directory.
        final: path of the copy in the run's directory; another checkpoint there is replaced.
        progress: function called with the bytes of each copied file.

    Raises:
        DataError: the disk has no room, or a checksum differs.
        StorageError: the store cannot be read.
    """
    text, manifest = read_remote_manifest(url)
    with lock_file(final.parents[1] / f".{final.name}.lock", doing=f"copying {url}", timeout_s=math.inf):
        if _manifest_text(final) != text:
            require_room(sum(int(entry["bytes"]) for entry in manifest.files.values()), final)
            with staged(final) as staging:
                fetch_files(url, manifest.files, staging, progress=progress)
                set_aside(final)
                give_name(staging, final, text)


def set_aside(final: Path) -> None:
    """Deletes a checkpoint, if it exists; renames it first, so that no partial checkpoint looks finished."""
    if final.exists():
        deleted = final.with_name(f".{final.name}.deleted")
        shutil.rmtree(deleted, ignore_errors=True)
        final.rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)


def is_small(path: Path, run_dir: Path) -> bool:
    """Whether a file of a run's directory is copied as a whole object: neither checkpoint nor hidden."""
    return path.is_file() and not path.is_symlink() and is_small_name(path.relative_to(run_dir).as_posix())


def is_small_name(name: str) -> bool:
    """Whether a file of a run's directory, given its path there, is copied as a whole object; see `is_small`."""
    parts = PurePosixPath(name).parts
    return parts[0] not in (CHECKPOINTS, UPLOADS) and not is_hidden(name)


def _drop_others(run_dir: Path, remote: list[RemoteCheckpoint]) -> None:
    """Deletes the checkpoints that the store lacks."""
    for path in (run_dir / CHECKPOINTS).glob("step-*"):
        same = [each for each in remote if path.name == f"step-{each.step:08d}"]
        if not any(read_remote_manifest(each.url)[0] == _manifest_text(path) for each in same):
            set_aside(path)


def _manifest_text(directory: Path) -> bytes | None:
    with suppress(OSError):
        return (directory / MANIFEST).read_bytes()
    return None


def _checkpoints(url: str, objects: Mapping[str, Stat]) -> list[RemoteCheckpoint]:
    found = []
    for name in objects:
        folder, _, file = name.partition("/")
        if file == MANIFEST and (match := _NAME.fullmatch(folder)) is not None:
            numbers = tuple(int(part) for part in match[2].split(".") if part)
            found.append(RemoteCheckpoint(int(match[1]), numbers, f"{url}/{CHECKPOINTS}/{folder}"))
    return sorted(found, reverse=True)


def _below(objects: Mapping[str, Stat], folder: str) -> dict[str, Stat]:
    return {name.removeprefix(f"{folder}/"): stat for name, stat in objects.items() if name.startswith(f"{folder}/")}


def _read(run_dir: Path) -> _StoreRecord | None:
    try:
        raw: dict[str, Any] = json.loads((run_dir / _RECORD).read_text())
        versions = {name: (int(size), str(version)) for name, (size, version) in raw["versions"].items()}
        return _StoreRecord(raw["url"], tuple(raw["tokens"]), versions)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(run_dir: Path, record: _StoreRecord) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / _RECORD, asdict(record))
