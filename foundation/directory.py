"""Directories that are complete or absent.

A stage writes into `staging_path(final)` and calls `commit`, which checksums every file, writes `manifest.json` last,
flushes everything to disk and renames. A directory with its final name is complete, whenever a process was killed.

`manifest.json` holds

- `kind`: the kind of directory (`tokens`, `run`, `checkpoint`, `model`),
- `config`: the resolved config with which it was made,
- `code`: the version of headrace, and the git commit if it ran from a checkout,
- `parents`: name -> {path, fingerprint} of the directories from which it was made,
- `details`: figures that depend on the kind (counts, sizes),
- `files`: relative path -> {bytes, sha256},
- `fingerprint`: SHA-256 of kind and files: equal fingerprints mean equal bytes, wherever and whenever they were made,
- `checksum`: SHA-256 of all fields above, if there are files: the manifest itself may be damaged.

No field depends on the time, the host or the number of workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foundation.errors import DataError
from foundation.foreign_folders import leads_out, what_it_is
from foundation.foreign_json import read_json
from foundation.paths import refuse_url
from foundation.version import __version__

Parents = dict[str, Any]
"""Name of a directory from which another was made -> its path and fingerprint."""

Details = dict[str, Any]
"""Figures in a manifest about how its directory was made."""

MANIFEST = "manifest.json"
COPIED_FROM = "commit.txt"
"""File beside the packages in a copy of a checkout, with the copied commit."""
_CHECKSUM = "checksum"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """The parsed `manifest.json` of a finished directory; see the module's docstring for the fields."""

    kind: str
    config: dict[str, Any]
    parents: Parents
    details: Details
    files: dict[str, dict[str, Any]]
    fingerprint: str
    code: dict[str, str | None]

    @property
    def bytes(self) -> int:
        """Bytes of the files, without the manifest itself."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def staging_path(final: Path) -> Path:
    """The path at which a directory is built before it gets its name: beside `final`, on the same file system."""
    return final.parent / f".{final.name}.partial"


def final_name(path: Path) -> str | None:
    """The name that a staging directory will get; None for any other directory."""
    name = path.name.removeprefix(".").removesuffix(".partial")
    return name if path == staging_path(path.with_name(name)) else None


def fresh_staging(final: Path) -> Path:
    """Makes an empty staging directory for `final`; deletes leftovers of a killed process."""
    refuse_url(final, field="output")
    staging = staging_path(final)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Makes an empty staging directory for `final`, and deletes it at the end of the block unless it was committed."""
    staging = fresh_staging(final)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def commit(
    staging: Path,
    final: Path,
    *,
    kind: str,
    config: Mapping[str, Any],
    parents: Mapping[str, Any] | None = None,
    details: Mapping[str, Any] | None = None,
    replace: bool = False,
    known_sha256: Mapping[str, str] | None = None,
) -> Manifest:
    """Checksums `staging`, writes its manifest, and renames it to `final`.

    Args:
        staging: a directory on the same file system as `final`, to which no process writes any more.
        final: the final path. An existing directory there is an error unless `replace`: then it is first moved aside,
            and deleted once the new directory has its name.
        known_sha256: checksums taken while writing: these files are not read again.

    Raises:
        DataError: `final` exists and `replace` is not given; or a file in `known_sha256` is missing.
    """
    _restore(final)
    if final.exists() and not replace:
        raise DataError(f"{final} exists already\n  try: remove it, or choose another output")
    known = known_sha256 or {}
    files = entries(staging, known_sha256=known)
    for name in known:
        if name not in files:
            raise DataError(f"{staging / name} was written and is not there\n  try: a file system that all hosts share")
    manifest = write_manifest(staging, kind=kind, config=config, parents=parents, details=details, files=files)
    _sync_tree(staging)
    _rename(staging, final)
    return manifest


def entries(staging: Path, *, known_sha256: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The manifest's entries for the files of a directory: name -> {"bytes", "sha256"}; see `commit`."""
    _share(staging)
    known = known_sha256 or {}
    return {name: _entry(staging / name, known.get(name)) for name in _files(staging)}


def parent_entry(path: str | Path, fingerprint: str) -> dict[str, str]:
    """A manifest's entry in `parents` for a directory from which another was made."""
    return {"path": str(path), "fingerprint": fingerprint}


def write_manifest(
    directory: Path,
    *,
    kind: str,
    config: Mapping[str, Any],
    parents: Mapping[str, Any] | None = None,
    details: Mapping[str, Any] | None = None,
    files: Mapping[str, Mapping[str, Any]] | None = None,
) -> Manifest:
    """Writes only the manifest: for `commit`, and for a directory that grows (a run), whose parts have their own."""
    listed = {name: dict(entry) for name, entry in (files or {}).items()}
    manifest = {
        "kind": kind,
        "config": dict(config),
        "code": code_version(),
        "parents": dict(parents or {}),
        "details": dict(details or {}),
        "files": listed,
        "fingerprint": _fingerprint(kind, listed),
    }
    own = {_CHECKSUM: _checksum(manifest)} if listed else {}
    write_json(directory / MANIFEST, manifest | own)
    return _parse(manifest)


def read_manifest(directory: str | Path, *, kind: str) -> Manifest:
    """Reads the manifest of a finished directory.

    Raises:
        DataError: there is no such directory, it has no manifest, or it has another kind.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    if not directory.is_dir():
        what = "it is a file, not a directory" if directory.exists() else "no such directory"
        raise DataError(f"{directory}: {what}{what_it_is(directory, _how_to_make(kind))}")
    try:
        manifest = parse_manifest(path.read_bytes(), path=str(path), remedy=_how_to_make(kind))
    except FileNotFoundError:
        why = f"{directory} has no {MANIFEST}: it was not finished, or not made by headrace"
        raise DataError(f"{why}{what_it_is(directory, _how_to_make(kind))}") from None
    check_kind(directory, manifest, kind=kind)
    return manifest


def kind_of(directory: Path) -> str | None:
    """The kind in a directory's manifest; None if there is no readable manifest."""
    with suppress(OSError, DataError):
        kind = read_json(directory / MANIFEST).get("kind")
        return kind if isinstance(kind, str) else None
    return None


def check_kind(directory: str | Path, manifest: Manifest, *, kind: str) -> None:
    """Raises DataError if a directory has another kind."""
    if manifest.kind != kind:
        raise DataError(f"{directory} holds a '{manifest.kind}', but a '{kind}' is needed\n  try: {_how_to_make(kind)}")


def parse_manifest(text: bytes, *, path: str, remedy: str = "make it again") -> Manifest:
    """Parses a `manifest.json`.

    Args:
        text: the file's bytes.
        path, remedy: path of the file and advice to the user, for the error message.

    Raises:
        DataError: the manifest is damaged.
    """
    try:
        raw = json.loads(text)
        manifest = _parse(raw)
        outside = [name for name in {**manifest.files} if leads_out(name)]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error!r}\n  try: {remedy}") from None
    if outside:
        raise DataError(f"{path} names {outside[0]}, which is not in its directory: refused\n  try: {remedy}")
    if raw.get(_CHECKSUM) not in (None, _checksum(raw)):
        raise DataError(f"{path} is damaged: its checksum is not the one it was written with\n  try: {remedy}")
    return manifest


def inner_manifest(text: bytes, *, path: str) -> Manifest | None:
    """Parses a manifest; None for another program's file with the same name, such as a web page's."""
    with suppress(ValueError, RecursionError, TypeError):
        if "fingerprint" not in json.loads(text):
            return None
    return parse_manifest(text, path=path)


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Compares every file's size with the manifest: cheap, finds truncation and loss.

    Raises:
        DataError: a file is missing or has another size; the message names the first one.
    """
    for name, entry in manifest.files.items():
        try:
            found = (directory / name).stat().st_size
        except FileNotFoundError:
            raise DataError(f"{directory / name} is missing; the manifest lists it\n  try: make it again") from None
        if found != entry["bytes"]:
            raise DataError(
                f"{directory / name} has {found} bytes, the manifest says {entry['bytes']}: truncated or overwritten\n"
                f"  try: make {directory} again"
            )


def verify(directory: Path, manifest: Manifest) -> Iterator[tuple[str, bool]]:
    """Reads every file and yields (name, whether its SHA-256 is the manifest's)."""
    for name, entry in manifest.files.items():
        path = directory / name
        yield name, path.is_file() and sha256_of_file(path) == entry["sha256"]


def sha256_of_file(path: Path, progress: Callable[[int], None] = lambda _bytes: None) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; `progress` is called with the number of bytes of each part read."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
            progress(size)
    return digest.hexdigest()


def write_json(path: Path, value: object) -> None:
    """Writes `value` as indented JSON, with `write_text`."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text with `whole_file`."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path for a file, then renames it in one step: a reader sees the old file or the new one.

    The file is flushed first. Several processes may write it at once, if it does not matter whose file stays. After an
    error no file is left.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:  # a full disk's error does not name the file
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def existing_parent(path: Path) -> Path:
    """The path itself if it exists, otherwise the nearest existing directory above it."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def free_bytes(path: Path) -> int:
    """Bytes that an unprivileged process can still write on the disk of a path, which need not exist."""
    disk = os.statvfs(existing_parent(path))
    return disk.f_bavail * disk.f_frsize


def fingerprint_of(value: object) -> str:
    """SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_version() -> dict[str, str | None]:
    """The version of headrace, and the git commit if this file is in a checkout or in a copy that names it."""
    root = Path(__file__).resolve().parents[1]
    commit_id = None
    if (copied := root / COPIED_FROM).is_file():
        commit_id = copied.read_text().strip() or None
    if (root / ".git").exists():
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        commit_id = done.stdout.strip() if done.returncode == 0 else None
    return {"headrace": __version__, "commit": commit_id}


def _share(root: Path) -> None:
    """Gives every file the mode that `open` would give; safetensors writes files that only their owner can read."""
    # take the mode of a new file: the umask can only be read by setting it, for all threads of the process
    probe = root / f".mode-{uuid.uuid4().hex[:12]}"
    try:
        probe.touch(0o666, exist_ok=False)
        mode = stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)
    for path in root.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.name != MANIFEST)


def _entry(path: Path, sha256: str | None) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256 or sha256_of_file(path)}


def _fingerprint(kind: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    return fingerprint_of({"kind": kind, "files": {name: entry["sha256"] for name, entry in files.items()}})


def _checksum(manifest: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps({key: value for key, value in manifest.items() if key != _CHECKSUM}))
    return fingerprint_of(plain)


def _parse(raw: Mapping[str, Any]) -> Manifest:
    return Manifest(**{field: raw[field] for field in Manifest.__dataclass_fields__})


def _sync_tree(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        sync(path)


def sync(path: Path) -> None:
    """Flushes a file or a directory entry to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename(staging: Path, final: Path) -> None:
    old = _aside(final)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    staging.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _aside(final: Path) -> Path:
    return final.parent / f".{final.name}.replaced"


def _restore(final: Path) -> None:
    """Gives a directory its name back if a process was killed after moving it aside, before placing the new one."""
    if _aside(final).exists() and not final.exists():
        _aside(final).rename(final)


def _how_to_make(kind: str) -> str:
    makers = {
        "tokens": "headrace prep --config CORPUS",
        "run": "headrace train --config CONFIG",
        "checkpoint": "headrace train --config CONFIG",
        "model": "headrace export RUN OUT",
        "logits": "headrace cache-logits --config CONFIG",
    }
    return f"make one with: {makers[kind]}" if kind in makers else "make it again"
