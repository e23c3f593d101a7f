"""A bounded cache on a disk of this host for spans of shards in object stores; all processes of the host share it.

A part holds the spans that a rank reads together for some optimizer steps, in one file with the SHA-256 of its data.
The file's name contains the order of samples and the step, by which parts are evicted: first parts that no reader needs
any more, then parts whose step is furthest from their reader's. A reader is a file that a living process locks. A
part's file is complete or absent, even if a process is killed while writing it. A file that the disk has lost or
changed is detected by its SHA-256 when it is read, and downloaded again.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from foundation.lock import lock_file

Bytes = tuple[str, int, int]
"""A range of an object: URL, start and size in bytes."""
_DIGEST_BYTES = 32
_LOCKS = 256
Readers = Mapping[str, Sequence[int]]
"""Order of samples -> steps at which living processes read it."""


@dataclass(frozen=True)
class Part:
    """Spans that are read together.

    Attributes:
        order: name of the tokens and the order of samples, in letters and digits.
        step: first optimizer step that needs the part.
        spans: ranges of objects; their bytes, concatenated, are the part's data.
    """

    order: str
    step: int
    spans: tuple[Bytes, ...]

    @cached_property
    def key(self) -> str:
        """Name of the spans, unique to them."""
        lines = "\n".join(f"{url} {start} {size}" for url, start, size in self.spans)
        return hashlib.sha256(lines.encode()).hexdigest()[:32]

    @cached_property
    def bytes(self) -> int:
        """Size of the spans."""
        return sum(size for _, _, size in self.spans)

    @property
    def stored(self) -> _Stored:
        """The file that stores the part."""
        return _Stored(self.order, self.step, self.bytes + _DIGEST_BYTES, self.key)


@dataclass(frozen=True)
class _Stored:
    """A file of the cache; `bytes` is its size."""

    order: str
    step: int
    bytes: int
    key: str

    @property
    def name(self) -> str:
        return f"{self.order}-{self.step}-{self.bytes}-{self.key}"

    @classmethod
    def of(cls, name: str) -> _Stored | None:
        """Parses a file name of the cache; None for any other name."""
        parts = name.split("-")
        if len(parts) != 4 or name.startswith("."):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]), parts[3])

    def distance(self, readers: Readers) -> float:
        """Returns the steps until a reader first needs the part; infinity if none does."""
        return min((self.step - at for at in readers.get(self.order, ()) if at <= self.step), default=math.inf)


class SpanCache:
    """The files of a cache.

    Args:
        folder: folder of the cache; created if missing.
        limit: largest number of bytes that all parts may take together.
    """

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._readers = folder / "readers"
        self._readers.mkdir(parents=True, exist_ok=True)

    @property
    def used(self) -> int:
        """Bytes of the parts in the cache."""
        return sum(each.bytes for each in self._stored())

    def has(self, part: Part) -> bool:
        """Whether the cache has a part."""
        return (self.folder / part.stored.name).exists()

    def read(self, part: Part) -> memoryview | None:
        """Reads the data of a part; None if it is not there. A damaged part is deleted."""
        path = self.folder / part.stored.name
        try:
            data = memoryview(path.read_bytes())
        except OSError:  # not there, or the disk cannot read it
            return None
        if len(data) == part.stored.bytes and hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]:
            return data[_DIGEST_BYTES:]
        path.unlink(missing_ok=True)
        return None

    def make_room(self, part: Part) -> bool:
        """Deletes as many parts that are needed later than this one as it takes; returns whether there is room."""
        with self._locked():
            return self._make_room(part.stored)

    def write(self, part: Part, data: Sequence[bytes]) -> bool:
        """Stores a part if there is room; returns whether there was.

        Raises:
            OSError: the disk is full or fails; nothing is stored.
        """
        digest = hashlib.sha256()
        for each in data:
            digest.update(each)
        partial = self.folder / ".partial"  # one name: overwrites what a killed process has left
        with self._locked():
            if not self._make_room(part.stored):
                return False
            try:
                with partial.open("wb") as file:
                    file.write(digest.digest())
                    file.writelines(data)
                partial.rename(self.folder / part.stored.name)
            finally:
                partial.unlink(missing_ok=True)
        return True

    def shrink(self, error: OSError) -> str:
        """Lowers the limit to the bytes in use, after an error of `write`; returns a warning."""
        self.limit = min(self.limit, self.used)
        left = f"from now on {self.limit / 1e9:,.3f} GB of it are used; data that has no room is read directly"
        return f"{self.folder}, the cache for tokens in object stores: {error.strerror}; {left}"

    def downloading(
        self, key: str, *, timeout_s: float = math.inf, wait: Callable[[], object] = lambda: None
    ) -> AbstractContextManager[int]:
        """Locks a part for the process that downloads it, so that no other does; see `lock_file`."""
        lock = self.folder / f".download-{int(key[:8], 16) % _LOCKS}.lock"
        return lock_file(lock, doing="downloading", timeout_s=timeout_s, wait=wait)

    @contextmanager
    def reader(self, order: str, step: int) -> Iterator[Callable[[int], None]]:
        """Registers this process as a reader of an order, at a step; yields a function that records each later step."""
        path = self._readers / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        unlocked = self.folder / f".{path.name}"  # under its own name it would look like that of an ended process
        handle = os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o644)

        def at(step: int) -> None:
            os.pwrite(handle, f"{order} {step:020d}".encode(), 0)

        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            at(step)
            unlocked.rename(path)
            yield at
        finally:
            unlocked.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            os.close(handle)

    def _make_room(self, part: _Stored) -> bool:
        readers, stored = self._living_readers(), list(self._stored())
        over = sum(each.bytes for each in stored) + part.bytes - self.limit
        own = part.distance(readers)
        later = [each for each in stored if each.distance(readers) > own]
        if over > sum(each.bytes for each in later):
            return False
        for each in sorted(later, key=lambda each: (-each.distance(readers), each.step)):
            if over <= 0:
                break
            (self.folder / each.name).unlink(missing_ok=True)
            over -= each.bytes
        return True

    def _stored(self) -> Iterator[_Stored]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if (found := _Stored.of(entry.name)) is not None:
                    yield found

    def _locked(self) -> AbstractContextManager[int]:
        return lock_file(self.folder / ".lock", doing="writing there", timeout_s=math.inf)

    def _living_readers(self) -> Readers:
        found = defaultdict(list)
        for path in self._readers.iterdir():
            with suppress(OSError), path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    order, _, step = file.read().partition(" ")
                    if step:
                        found[order].append(int(step))
                    continue
                path.unlink(missing_ok=True)
        return found
