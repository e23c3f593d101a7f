"""Outputs that are URLs: a stage works in a directory on this host, and its output is uploaded at the end.

Each URL has its directory on this host, below HEADRACE_CACHE. Files that stages keep beside their outputs (hours of a
killed process's work) stay there, and the next start with the same URL finds them.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from foundation.directory import MANIFEST, Manifest, free_bytes, parse_manifest, read_manifest
from foundation.errors import ConfigError, DataError
from foundation.lock import lock_file
from foundation.paths import is_store_url
from foundation.remote_directory import cache_root, find_manifest
from foundation.remote_publish import check_arrived, check_can_write, publish, remove_probes, send_files, taken
from foundation.storage import upload

_OUTPUTS = "outputs"


def local_output(output: str | Path) -> Path:
    """The path at which a stage writes an output on this host; a URL's is below HEADRACE_CACHE."""
    text = str(output)
    if not is_store_url(text):
        return Path(output)
    return cache_root() / _OUTPUTS / hashlib.sha256(text.encode()).hexdigest()[:16] / PurePosixPath(text).name


def check_output(output: str, *, field: str = "output", needed: int = 0) -> None:
    """Refuses an output that cannot be written, before any work.

    Args:
        output: a path or a URL.
        field: config key or argument that named the output.
        needed: bytes that a stage writes on this host before they are uploaded; 0 if unknown.

    Raises:
        ConfigError: the output is an existing path.
        DataError: the URL has a finished directory, the store ignores conditions of conditional writes, or the disk has
            no room.
        StorageError: the store cannot be written to.
    """
    final = local_output(output)
    if not is_store_url(output):
        if final.exists():
            raise ConfigError(field, output, why="it already exists", remedy="remove it, or choose another name")
        return
    if (manifest := find_manifest(output)) is not None:
        _remove_uploaded(final, manifest)
        raise taken(output)
    check_can_write(output)
    if needed > (free := free_bytes(final)):
        why = f"{output} is made in {final.parent} first, which needs {needed / 1e9:,.2f} GB; {free / 1e9:,.2f} GB are"
        raise DataError(f"{why} free there\n  try: a directory on a larger disk in HEADRACE_CACHE")


@contextmanager
def published(output: str) -> Iterator[Path]:
    """Yields the path at which a stage writes, and uploads the output when the block ends without an error.

    An output that is a path stays as it is. At a URL, a directory with a manifest is published completely or not at
    all. Other files are uploaded one by one, each completely, and replace existing ones. An output left on this host by
    a process that was killed during its upload is made again; where that would take hours, see `upload_left`.

    Args:
        output: a path or a URL.

    Raises:
        DataError: another process on this host writes to this URL; see also `check_output` and `publish`.
        StorageError: the upload failed. The output is kept; the message says where.
    """
    final = local_output(output)
    if not is_store_url(output):
        yield final
        return
    with _locked(final, output):
        _remove(final)
        try:
            yield final
        except BaseException:
            _remove_if_empty(final.parent)
            raise
        _send(final, output)


def upload_finished(output: str) -> None:
    """Uploads a resumable stage's finished output from `local_output`; only one of several processes does.

    Args:
        output: a URL; nothing happens with a path.

    Raises:
        DataError: another process has written a directory there, or the upload is incomplete.
        StorageError: the upload failed. The output is kept; the message says where.
    """
    if is_store_url(output):
        final = local_output(output)
        with _locked(final, output, timeout_s=math.inf):
            _send(final, output)


def upload_left(output: str, *, config: Mapping[str, Any], parents: Mapping[str, Any]) -> Manifest | None:
    """Uploads the finished output of a process that was killed during its upload, if config and parents match.

    Args:
        output: a URL; nothing happens with a path.
        config, parents: config and parents that its manifest must have; parents: name -> {"path", "fingerprint"}.

    Returns:
        The output's manifest; None if no output is left.

    Raises:
        DataError: the leftover output does not match, or its upload is incomplete.
        StorageError: the upload failed. The output is kept; the message says where.
    """
    final = local_output(output)
    if not is_store_url(output) or not (final / MANIFEST).is_file():
        return None
    manifest = parse_manifest((final / MANIFEST).read_bytes(), path=str(final / MANIFEST))
    if manifest.config != json.loads(json.dumps(config)) or manifest.parents != parents:
        why = f"{final} was made for {output} of another config or model by a process that ended before it was uploaded"
        remedy = f"headrace copy {final} {output}, or rm -r {final.parent}, and make it again"
        raise DataError(f"{why}\n  try: {remedy}")
    with _locked(final, output):
        _send(final, output)
    print(f"{output}: uploaded what an earlier process had finished", file=sys.stderr, flush=True)
    return manifest


def finished(output: str | Path, *, kind: str) -> Manifest | None:
    """Reads the manifest of an output; None if there is no output.

    Raises:
        DataError: something else is there.
        StorageError: the store cannot be read.
    """
    if is_store_url(str(output)):
        return find_manifest(str(output))
    return read_manifest(output, kind=kind) if Path(output).exists() else None


@contextmanager
def _locked(final: Path, url: str, *, timeout_s: float = 0.0) -> Iterator[None]:
    final.parent.mkdir(parents=True, exist_ok=True)
    lock = final.parent.with_name(f".{final.parent.name}.lock")
    with lock_file(lock, doing=f"writing {url} on this host", timeout_s=timeout_s):
        final.parent.mkdir(exist_ok=True)
        yield


@contextmanager
def all_published(outputs: Sequence[str]) -> Iterator[None]:
    """Applies `check_output` and `published` to the outputs of a command line.

    Args:
        outputs: URLs.

    Raises:
        DataError: an output exists or cannot be written, or its upload is incomplete.
        StorageError: the store cannot be written to.
    """
    with ExitStack() as stack:
        for url in outputs:
            check_output(url)
            stack.enter_context(published(url))
        yield


def _send(final: Path, url: str) -> None:
    """Uploads a stage's output, if there is one, and deletes its directory on this host."""
    whole = (final / MANIFEST).is_file()
    try:
        if whole:
            publish(final, url)
            remove_probes(url)
        elif final.is_dir():
            sizes = {str(p.relative_to(final)): p.stat().st_size for p in sorted(final.rglob("*")) if p.is_file()}
            send_files(final, url, sizes)
        elif final.exists():
            upload(final, url)
            check_arrived(url, {"": final.stat().st_size})
        else:
            return _remove_if_empty(final.parent)
    except DataError as error:
        how = f"; headrace copy {final} {url} uploads it" if whole else ""
        raise type(error)(f"{error}\n  what was made is kept: {final}{how}") from None
    return shutil.rmtree(final.parent, ignore_errors=True)


def _remove_uploaded(final: Path, manifest: Manifest) -> None:
    """Deletes an uploaded output's directory on this host, if a process was killed before it did so."""
    with suppress(OSError, DataError):
        if parse_manifest((final / MANIFEST).read_bytes(), path=str(final)) == manifest:
            shutil.rmtree(final.parent, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_if_empty(place: Path) -> None:
    if place.is_dir() and not any(place.iterdir()):
        place.rmdir()
