"""Folders in object stores that are read from a disk (models, tokenizers, logits): a copy in this host's cache.

A folder from headrace is complete if it has a manifest, and every checksum is compared. A plain Hugging Face folder has
none: sizes and the store's versions are compared before and after.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from foundation.directory import MANIFEST, Manifest, fingerprint_of, staged
from foundation.errors import DataError
from foundation.foreign_folders import leads_out
from foundation.model_names import offline_remedy
from foundation.paths import is_store_url
from foundation.remote_directory import (
    cached,
    fetch_files,
    find_manifest,
    made_once,
    read_remote_manifest,
    require_room,
)
from foundation.remote_run import CHECKPOINTS, local_run
from foundation.storage import Stat, StorageError, objects_below

_TRY = "\n  try: "
_TEMPLATES = "additional_chat_templates/"
_GROWING = {"run": "headrace export {url} OUT", "tokens": "headrace copy {url} DIR"}
"""Kind of directory that is not read as a folder -> the command to use instead."""


def local_folder(path: str | Path) -> Path:
    """Returns a folder on this host: the path itself, or a copy of a URL's folder, made by one process of the host.

    Raises:
        DataError: there is no folder, it is a run or a corpus, the disk has no room, or it was changed meanwhile.
        StorageError: the store cannot be read.
    """
    return _copied(str(path).rstrip("/")) if is_store_url(str(path)) else Path(path)


def local_tokens(url: str, *, found: tuple[bytes, Manifest] | None = None) -> Path:
    """Copies the manifest and tokenizer of a tokens directory in an object store to this host's cache.

    Args:
        url: URL of the tokens directory.
        found: the manifest's bytes and content, if already read (see `read_remote_manifest`); None reads them.

    Raises:
        DataError: the disk has no room, there is no finished directory, or a checksum differs.
        StorageError: the store cannot be read.
    """
    return cached(url, wanted=lambda name: name.startswith("tokenizer/"), found=found)


def local_directory(url: str) -> Path:
    """Copies to this host the files needed to read the manifests of a run, a checkpoint, tokens or a folder.

    Raises:
        DataError: there is no such directory, or it cannot be copied.
        StorageError: the store cannot be read.
    """
    manifest = find_manifest(url)
    if f"/{CHECKPOINTS}/" in url or (manifest is not None and manifest.kind in ("run", "checkpoint")):
        return local_run(url)
    return local_tokens(url) if manifest is not None and manifest.kind == "tokens" else local_folder(url)


@cache
def _copied(url: str) -> Path:
    try:
        found = objects_below(url)
    except StorageError as error:
        name = url.partition("hf://")[2]
        if not name:
            raise
        raise StorageError(f"{str(error).partition(_TRY)[0]}{_TRY}{offline_remedy(name)}") from None
    if MANIFEST not in found:
        return _plain(url, found)
    text, manifest = read_remote_manifest(url)
    if manifest.kind in _GROWING:
        why = f"{url} holds a '{manifest.kind}', which is not read as a folder"
        raise DataError(f"{why}\n  try: {_GROWING[manifest.kind].format(url=url)}")
    return cached(url, wanted=lambda _name: True, found=(text, manifest))


def _plain(url: str, found: dict[str, Stat]) -> Path:
    """Copies a folder without a manifest: its own files, and only chat templates from its subfolders."""
    own = {name: stat for name, stat in sorted(found.items()) if not leads_out(name)}
    wanted = {name: stat for name, stat in own.items() if "/" not in name or name.startswith(_TEMPLATES)}
    if not wanted:
        why = "no object has this prefix" if not found else f"all of its {len(found)} objects are in subfolders"
        raise DataError(f"{url} is no folder: {why}\n  try: check the address")
    listing = {name: [stat.bytes, stat.version] for name, stat in wanted.items()}
    return made_once(url, fingerprint_of([url, listing]), lambda final: _copy(url, wanted, final))


def _copy(url: str, wanted: dict[str, Stat], final: Path) -> None:
    require_room(sum(stat.bytes for stat in wanted.values()), final)
    with staged(final) as staging:
        fetch_files(url, {name: {"bytes": stat.bytes} for name, stat in wanted.items()}, staging)
        now = objects_below(url)
        changed = [name for name, stat in wanted.items() if name not in now or now[name].differs_from(stat)]
        if changed:
            why = f"{url}/{changed[0]} was changed while it was copied"
            raise DataError(f"{why}\n  try: again, when no process writes there")
        staging.rename(final)
