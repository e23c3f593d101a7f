"""One rank's file of a checkpoint: written without a word to other ranks, flushed, and checksummed on the way.

The files are those of torch.distributed.checkpoint (`FileSystemWriter`); its reader reads them.
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

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from pipeline.checkpoint.plan import WritePlan

_PATIENCE_S = 10.0
METADATA = ".metadata"
"""The file in which torch.distributed.checkpoint says what lies where."""


@dataclass(frozen=True)
class Written:
    """What a rank wrote.

    Attributes:
        results: where which piece lies.
        sha256: file name -> checksum.
    """

    results: list[WriteResult]
    sha256: dict[str, str]


def write_pieces(plan: WritePlan, source: Callable[[WriteItem], Tensor], directory: Path) -> Written:
    """Writes and flushes a rank's pieces. Not collective; may run in any thread.

    Args:
        plan: which pieces.
        source: finds the values of a piece, on any device.
        directory: exists, and is the same for all ranks.

    Raises:
        OSError, RuntimeError: it could not be written.
    """
    _wait_for(directory)
    files = _Checksummed()
    writer = _writer(directory, files)
    writer.set_up_storage_writer(plan.rank == 0)
    items = writer.prepare_global_plan([SavePlan([])] * plan.rank + [plan.items])[-1]
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # takes three times as long as SHA-256, and finds less
    try:
        results: list[WriteResult] = writer.write_data(items, cast("Any", _Source(source))).value()
    finally:
        torch.serialization.set_crc32_options(before)
    return Written(results, files.sha256)


def _wait_for(directory: Path) -> None:
    """Rank 0 has made it; a network file system may show it here a moment later."""
    deadline = time.monotonic() + _PATIENCE_S
    while not directory.is_dir():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{directory} is not seen on {socket.gethostname()}: is run.dir on a shared file system?"
            )
        time.sleep(0.05)


def write_metadata(plan: WritePlan, directory: Path, results: Sequence[list[WriteResult]]) -> None:
    """Writes what tells a reader where everything lies; rank 0 does, when all have written."""
    assert plan.metadata is not None
    _writer(directory, FileSystem()).finish(plan.metadata, list(results))


def _writer(directory: Path, files: FileSystem) -> FileSystemWriter:
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = files
    return writer


class _Source:
    """The one method of a planner that a writer calls."""

    def __init__(self, find: Callable[[WriteItem], Tensor]) -> None:
        self._find = find

    def resolve_data(self, item: WriteItem) -> Tensor:
        assert item.type != WriteItemType.BYTE_IO, "a state has nothing but tensors"
        return self._find(item)


class _Checksummed(FileSystem):
    """Takes the checksum of every file while it is written, so that it need not be read again."""

    def __init__(self) -> None:
        self.sha256: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with Path(path).open(mode, buffering=0) as file:
            stream = _Stream(cast("io.FileIO", file))
            yield cast("io.IOBase", stream)
            if stream.error is not None:
                raise stream.error
        self.sha256[Path(path).name] = stream.digest.hexdigest()


class _Stream:
    """A file that is only appended to. After an error nothing is written any more, and the error is kept.

    Raised at once it would be lost: torch's zip writer goes on to write its end, and that error is the one it raises.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file, self.digest, self._at = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        whole = rest = memoryview(data).cast("B")
        self._at += whole.nbytes
        while rest and self.error is None:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                self.error = error
        self.digest.update(whole)
        return whole.nbytes

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """Nothing is kept back."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Whoever opened the file closes it."""

    def writable(self) -> bool:
        return True
