"""Writes and flushes one rank's checkpoint file without communication, and computes its checksum meanwhile.

The files have the format of torch.distributed.checkpoint (its `FileSystemWriter`), for its reader (`torch_reader`).
That writer is not used, since it keeps every tensor of a file until the file's end: tensors that are read one by one
would all be in memory.
"""

from __future__ import annotations

import hashlib
import io
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

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
    name, places = f"__{plan.rank}_0.distcp", []
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # CRC-32 takes three times as long as SHA-256, and detects less
    try:
        with (directory / name).open("wb", buffering=0) as file:
            stream = _ChecksummedStream(file)
            for item in plan.items:
                begin = stream.tell()
                _save(lookup(item), stream)
                places.append((begin, stream.tell() - begin))
            os.fsync(file.fileno())
    finally:
        torch.serialization.set_crc32_options(before)
    locations = Locations(name if places else None, np.array(places, dtype=np.int64).reshape(-1, 2))
    return WrittenShards(locations, {name: stream.digest.hexdigest()})


def _save(value: Tensor, stream: _ChecksummedStream) -> None:
    """Writes one shard, of which no copy remains.

    Raises:
        OSError: the write failed.
    """
    value = value.detach().cpu()
    if value.untyped_storage().nbytes() != value.nbytes:
        value = value.clone()  # torch.save writes the whole storage of a view
    torch.save(value, cast("IO[bytes]", stream))
    if stream.error is not None:
        raise stream.error


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
