"""Fetches a checkpoint from an object store; each rank copies some of its files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from foundation.directory import Manifest, fresh_staging, staging_path
from foundation.errors import DataError
from foundation.remote_directory import fetch_files, give_name, read_remote_manifest, require_room
from foundation.remote_run import set_aside
from foundation.storage import StorageError, objects_below, patiently
from pipeline.checkpoint.checkpoint import StoredCheckpoint
from pipeline.runtime.faults.progress import progress_from_io
from pipeline.runtime.launch.errors_on_all_ranks import on_rank_zero

_RETRIES_S = (1.0, 5.0, 25.0)
"""Seconds between attempts to read a file, besides the retries of the store's package."""


def fetch_collective(checkpoint: StoredCheckpoint, on_progress: Callable[[], None]) -> str | None:
    """Copies a checkpoint to this host, whole or not at all; returns a description of damage, or None. Collective.

    Every rank copies a share of the files, and compares their checksums.

    Args:
        checkpoint: the checkpoint; the copy replaces any files at its path.
        on_progress: called while files arrive.

    Raises:
        DataError: there is no room for the copy.
        StorageError: the store cannot be read.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    final = checkpoint.path
    text, manifest, damage = on_rank_zero(lambda: _begin(checkpoint))
    if manifest is None:
        return damage
    own: str | StorageError | None = None
    with progress_from_io(on_progress):
        try:
            own = _fetch(checkpoint.url, manifest, sorted(manifest.files)[rank::ranks], staging_path(final))
        except StorageError as error:
            own = error
    found = [own]
    if ranks > 1:
        found = [None] * ranks
        dist.all_gather_object(found, own)
    for each in found:
        if isinstance(each, StorageError):
            raise each
    damage = next((each for each in found if isinstance(each, str)), None)
    if damage is None:
        on_rank_zero(lambda: _commit(final, text))
    return damage


def _begin(checkpoint: StoredCheckpoint) -> tuple[bytes, Manifest | None, str | None]:
    try:
        text, manifest = patiently(partial(read_remote_manifest, checkpoint.url))
    except StorageError:
        raise
    except DataError as error:
        return b"", None, str(error).splitlines()[0]
    require_room(sum(int(entry["bytes"]) for entry in manifest.files.values()), checkpoint.path)
    fresh_staging(checkpoint.path)
    return text, manifest, None


def _commit(final: Path, text: bytes) -> None:
    set_aside(final)
    give_name(staging_path(final), final, text)


def _fetch(url: str, manifest: Manifest, names: Sequence[str], staging: Path) -> str | None:
    """Copies files; returns a description of damage, or None.

    Raises:
        StorageError: the store cannot be read.
    """
    files = {name: manifest.files[name] for name in names}
    for pause_s in (*_RETRIES_S, None):
        try:
            fetch_files(url, files, staging)
        except StorageError:
            if pause_s is None:
                there = objects_below(url)
                missing = next((name for name in names if name not in there), None)
                if missing is not None:
                    return f"{missing} is missing there"
                raise
            time.sleep(pause_s)
        except DataError as error:
            return str(error).splitlines()[0]
        else:
            return None
    return None
