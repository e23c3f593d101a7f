"""Sources of a checkpoint's shards: this node's memory, another node's, or the checkpoint's directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, cast

from torch.distributed.checkpoint.utils import _create_file_view

from foundation.directory import sha256_of_file
from foundation.errors import CheckpointError
from pipeline.checkpoint.memory.memory_server import Client

T = TypeVar("T")


@dataclass
class ReadBytes:
    """Bytes of checkpoint files that a rank has read, including files that were only verified.

    Attributes:
        memory: bytes read from copies in this node's memory.
        other_nodes: bytes read from copies in other nodes' memory.
        run_dir: bytes read from files in the run's directory, manifests and metadata excluded.
    """

    memory: int = 0
    other_nodes: int = 0
    run_dir: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, source: str, nbytes: int) -> None:
        """Counts bytes read from a source, given as the name of an attribute. Thread-safe."""
        with self._lock:
            setattr(self, source, getattr(self, source) + nbytes)

    def clear(self) -> None:
        """Resets the counts to zero."""
        self.memory = self.other_nodes = self.run_dir = 0

    def values(self) -> dict[str, int]:
        """Returns the counts: source -> bytes."""
        return {"memory": self.memory, "other_nodes": self.other_nodes, "run_dir": self.run_dir}


class ShardSource(Protocol):
    """Opens parts of files."""

    @property
    def name(self) -> str:
        """Name under which `ReadBytes` counts the bytes."""
        ...

    def opened(self, file: str, begin: int, length: int) -> AbstractContextManager[IO[bytes]]:
        """Opens a part of a file.

        Raises:
            OSError: it cannot be read.
        """
        ...


@dataclass(frozen=True)
class FolderSource:
    """Files of a directory.

    Attributes:
        name: name under which `ReadBytes` counts the bytes.
        folder: the directory.
    """

    name: str
    folder: Path

    @contextmanager
    def opened(self, file: str, begin: int, length: int) -> Iterator[IO[bytes]]:
        """Implements `ShardSource.opened`."""
        with (self.folder / file).open("rb") as opened:
            yield cast("IO[bytes]", _create_file_view(opened, begin, length))


@dataclass(frozen=True)
class NodeSource:
    """Files in another node's memory.

    Attributes:
        client: client of a rank on that node.
        name: name under which `ReadBytes` counts the bytes.
    """

    client: Client
    name: str = "other_nodes"

    @contextmanager
    def opened(self, file: str, begin: int, length: int) -> Iterator[IO[bytes]]:
        """Implements `ShardSource.opened`."""
        yield self.client.read(file, begin, length)


class ShardFiles:
    """The files of one checkpoint.

    Args:
        directory: directory of the checkpoint.
        copies: file name -> source of its verified copy.
        files: file name -> its entry in the manifest, to verify the file when its copy fails.
        reads: counter of the bytes read.
        warn: function called with a message when a copy fails.
        source: source of the files that have no copy; None for the directory.
    """

    def __init__(
        self,
        directory: Path,
        copies: Mapping[str, ShardSource] | None = None,
        *,
        files: Mapping[str, Mapping[str, Any]] | None = None,
        reads: ReadBytes | None = None,
        warn: Callable[[str], None] = lambda _line: None,
        source: ShardSource | None = None,
    ) -> None:
        self._directory: ShardSource = source or FolderSource("run_dir", directory)
        self._path = directory
        self._copies = dict(copies or {})
        self._files, self._reads, self._warn = files or {}, reads or ReadBytes(), warn

    def read(
        self, file: str, begin: int, length: int, parse: Callable[[IO[bytes], str], T], *, nbytes: int | None = None
    ) -> T:
        """Reads and parses a part of a file, from the directory if the copy cannot be read or parsed.

        Args:
            file: name of the file.
            begin: first byte.
            length: number of bytes.
            parse: returns the value, given the opened bytes and the file's name.
            nbytes: number of bytes that `parse` reads, for the count; `length` when None.

        Raises:
            OSError: the file cannot be read.
            CheckpointError: `parse` raised it, or the file differs from the manifest.
        """
        copy = self._copies.get(file)
        if copy is not None:
            try:
                return self._read(copy, file, begin, length, parse, nbytes=nbytes)
            except (OSError, CheckpointError) as error:
                del self._copies[file]
                self._warn(f"the copy of {file} in memory cannot be read ({error}); its file is read instead")
                self._verify(file)
        return self._read(self._directory, file, begin, length, parse, nbytes=nbytes)

    def _read(
        self,
        source: ShardSource,
        file: str,
        begin: int,
        length: int,
        parse: Callable[[IO[bytes], str], T],
        *,
        nbytes: int | None,
    ) -> T:
        with source.opened(file, begin, length) as view:
            value = parse(view, file)
        self._reads.add(source.name, length if nbytes is None else nbytes)
        return value

    def _verify(self, file: str) -> None:
        wanted = self._files.get(file)
        path = self._path / file
        if wanted is not None:
            self._reads.add("run_dir", path.stat().st_size)
            if sha256_of_file(path) != wanted["sha256"]:
                raise CheckpointError(f"{file} does not have the checksum it was written with")
