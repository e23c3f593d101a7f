"""Writes and flushes one rank's checkpoint file without communication, and computes its checksum meanwhile.

The files have the format of torch.distributed.checkpoint (`FileSystemWriter`), for its reader (`torch_reader`).
"""

from __future__ import annotations

import hashlib
import io
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from pipeline.checkpoint.format.metadata import METADATA
from pipeline.checkpoint.write.locations import Locations
from pipeline.checkpoint.write.plan import WritePlan

_DIRECTORY_S = 10.0


@dataclass(frozen=True)
class WrittenShards:
    """Locations and checksums of the shards that a rank has written.

    Attributes:
        locations: locations of the rank's shards; None in a message to rank 0 if they equal the previous save's.
        sha256: file name -> checksum.
        not_copied: reason why this or the previous save's file has no copy in memory; None if it has or needs none.
    """

    locations: Locations | None
    sha256: dict[str, str]
    not_copied: str | None = None


def write_shards(plan: WritePlan, lookup: Callable[[WriteItem], Tensor], directory: Path) -> WrittenShards:
    """Writes and flushes a rank's shards. Not collective; may run in any thread.

    Args:
        plan: plan of the shards to write.
        lookup: returns the values of a shard, on any device.
        directory: existing directory, the same for all ranks.

    Raises:
        OSError, RuntimeError: a write failed.
    """
    _wait_for_directory(directory)
    files = _ChecksummedFiles()
    writer = _writer(directory, files)
    writer.set_up_storage_writer(plan.rank == 0)
    items = writer.prepare_global_plan([SavePlan([])] * plan.rank + [SavePlan(list(plan.items))])[-1]
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # CRC-32 takes three times as long as SHA-256, and detects less
    try:
        results: list[WriteResult] = writer.write_data(items, cast("Any", _ValuePlanner(lookup))).value()
    finally:
        torch.serialization.set_crc32_options(before)
    return WrittenShards(_locations(plan, results), files.sha256)


def _locations(plan: WritePlan, results: Sequence[WriteResult]) -> Locations:
    found = {result.index: result.storage_data for result in results}
    places = [(found[item.index].offset, found[item.index].length) for item in plan.items]
    names = {info.relative_path for info in found.values()}
    assert len(names) <= 1, "a rank writes one file"
    return Locations(next(iter(names), None), np.array(places, dtype=np.int64).reshape(-1, 2))


def _wait_for_directory(directory: Path) -> None:
    """Waits for the directory that rank 0 has made, which a network file system may show here a moment later."""
    deadline = time.monotonic() + _DIRECTORY_S
    while not directory.is_dir():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{directory} is not visible on {socket.gethostname()}: is run.dir on a shared file system?"
            )
        time.sleep(0.05)


def write_metadata(encoded: bytes, directory: Path) -> str:
    """Writes and flushes the metadata that locates every shard; runs on rank 0 when all ranks have written.

    Returns:
        SHA-256 of the metadata.
    """
    with (directory / METADATA).open("wb") as file:
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(encoded).hexdigest()


def _writer(directory: Path, files: FileSystem) -> FileSystemWriter:
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = files
    return writer


class _ValuePlanner:
    """Planner with the one method that a writer calls."""

    def __init__(self, lookup: Callable[[WriteItem], Tensor]) -> None:
        self._lookup = lookup

    def resolve_data(self, item: WriteItem) -> Tensor:
        assert item.type != WriteItemType.BYTE_IO, "a state has only tensors"
        return self._lookup(item)


class _ChecksummedFiles(FileSystem):
    """Computes the checksum of every file while it is written, so that no file is read again."""

    def __init__(self) -> None:
        self.sha256: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with Path(path).open(mode, buffering=0) as file:
            stream = _ChecksummedStream(cast("io.FileIO", file))
            yield cast("io.IOBase", stream)
            if stream.error is not None:
                raise stream.error
        self.sha256[Path(path).name] = stream.digest.hexdigest()


class _ChecksummedStream:
    """An append-only file. After an error nothing more is written, and the error is stored.

    An error raised at once would be lost: torch's zip writer goes on to write its footer, and raises that error.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file, self.digest, self._position = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = remaining = memoryview(data).cast("B")
        self._position += view.nbytes
        while remaining and self.error is None:
            try:
                remaining = remaining[self._file.write(remaining) :]
            except OSError as error:
                self.error = error
        self.digest.update(view)
        return view.nbytes

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Does nothing: the file is unbuffered."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Does nothing: `create_stream` closes the file."""

    def writable(self) -> bool:
        return True
