"""Finds damaged checkpoints: files whose checksums differ from those recorded when they were written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from foundation.directory import sha256_of_file
from foundation.errors import HeadraceError
from pipeline.checkpoint.checkpoint import Checkpoint
from pipeline.checkpoint.format.metadata import METADATA, TORCH_METADATA
from pipeline.checkpoint.memory.restart_files import RestartFiles

_HASH_THREADS = 4
"""Number of threads with which a rank hashes a checkpoint: a single thread is slower than a disk."""


def find_damage(checkpoint: Checkpoint) -> str | None:
    """Verifies a checkpoint's files by their checksums; returns a description of the damage, or None."""
    listed, damage = _listed(checkpoint)
    return damage or _damage(checkpoint, list(listed.items()), lambda _name, _bytes: None)


def find_damage_collective(
    checkpoint: Checkpoint, on_progress: Callable[[], None], restart: RestartFiles
) -> str | None:
    """Like `find_damage`; each rank verifies a share of the files, or their copies in memory. Collective."""
    listed, damage = _listed(checkpoint)
    copied = restart.find(checkpoint.path, checkpoint.step, listed)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def read(name: str, nbytes: int) -> None:
        if name not in (METADATA, TORCH_METADATA):
            restart.reads.add("run_dir", nbytes)
        on_progress()

    share = [row for row in listed.items() if row[0] not in copied][rank::ranks]
    damage = damage or _damage(checkpoint, share, read)
    if not dist.is_initialized():
        return damage
    found: list[str | None] = [None] * ranks
    dist.all_gather_object(found, damage)
    return next((damage for damage in found if damage is not None), None)


def _listed(checkpoint: Checkpoint) -> tuple[Mapping[str, Mapping[str, Any]], str | None]:
    """Lists the files in a checkpoint's manifest; also returns why the manifest cannot be read, or None."""
    try:
        return checkpoint.manifest.files, None
    except HeadraceError as error:
        return {}, str(error).splitlines()[0]


def _damage(
    checkpoint: Checkpoint, files: Sequence[tuple[str, Mapping[str, Any]]], progress: Callable[[str, int], None]
) -> str | None:
    """Verifies files, given as (name, entry in the manifest); returns a description of the damage, or None."""

    def sha256_of(path: Path) -> str:
        return sha256_of_file(path, partial(progress, path.name))

    def is_intact(name: str, entry: Mapping[str, Any]) -> bool:
        path = checkpoint.path / name
        try:
            return path.stat().st_size == int(entry["bytes"]) and sha256_of(path) == str(entry["sha256"])
        except OSError:
            return False

    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        intact = list(threads.map(lambda file: is_intact(*file), files))
    damaged = next((name for (name, _), good in zip(files, intact, strict=True) if not good), None)
    return damaged and f"{damaged} does not have the checksum it was written with"
