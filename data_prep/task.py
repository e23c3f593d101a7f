"""`Task` protocol: the interface between units of work and the executors that schedule them.

A task is a small frozen value that pickles. `run` is idempotent and deterministic: it writes the result under a
temporary name, publishes it by one rename, and writes the same bytes on any worker, at any attempt, beside any other
tasks. Running a finished task only reads its completion marker. So an executor needs no knowledge of tasks, and may run
a task twice (retry, speculative execution).
"""

from __future__ import annotations

import errno
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import xxhash

from foundation.directory import sync
from foundation.errors import DataError

Marker = dict[str, Any]
"""The result of a finished task, as its marker file records it."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Work done since the last progress report.

    Attributes:
        input_bytes: bytes of input read, as stored (compressed).
        text_bytes: bytes of UTF-8 of the documents.
        documents, tokens: number of documents and of tokens.
        dropped: reason -> number of dropped documents.
    """

    input_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.input_bytes + other.input_bytes,
            self.text_bytes + other.text_bytes,
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.dropped + other.dropped,
        )


MARKER = "done.json"
"""Completion marker in the directory of a finished task: the JSON object that `run` returned."""
_CHECKSUM = "xxh3_64"
SCRATCH = ".*.partial*"
"""Glob of the scratch paths that a killed task may leave behind."""

Report = Callable[[Counts], None]
"""Progress callback of a task; it takes the work done since the previous call."""


class Task(Protocol):
    """One unit of work of a job, run by an executor's worker."""

    @property
    def name(self) -> str:
        """Name of the task in messages, e.g. `map task 3`."""

    @property
    def finished(self) -> bool:
        """Whether the completion marker exists."""

    def run(self, report: Report) -> Marker:
        """Does the work unless the task has finished already.

        Args:
            report: progress callback.

        Returns:
            The contents of the completion marker.

        Raises:
            DataError: the input is not usable, or the output cannot be written (e.g. the disk is full).
        """


def read_marker(directory: Path) -> Marker | None:
    """Reads a task's completion marker; None if the task has not finished.

    Raises:
        DataError: the marker is damaged.
    """
    return read_marker_file(directory / MARKER, remove=directory)


def read_marker_file(path: Path, *, remove: Path) -> Marker | None:
    """Reads the JSON object in a marker, without its checksum; None if there is no such file.

    Args:
        path: path of the marker.
        remove: path to remove for repeating the task, named in the message.

    Raises:
        DataError: the marker is damaged.
    """
    try:
        return without_checksum(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except ValueError as error:
        why = f"{path} is damaged: {error}"
        raise DataError(f"{why}\n  try: rm -r {remove} and run again: only its task is repeated") from None


def with_checksum(value: Mapping[str, Any]) -> Marker:
    """Returns a JSON object with a checksum of its entries."""
    return {**value, _CHECKSUM: _json_checksum(value)}


def without_checksum(value: Any) -> Marker:
    """Returns the entries of an object from `with_checksum`; objects of older versions have no checksum.

    Raises:
        ValueError: the value is not an object, or its checksum differs.
    """
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    entries = {key: entry for key, entry in value.items() if key != _CHECKSUM}
    if _CHECKSUM in value and value[_CHECKSUM] != _json_checksum(entries):
        raise ValueError("it differs from its checksum")
    return entries


def _json_checksum(value: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


class DirectoryTask:
    """Base class of tasks whose result is a directory. Subclasses are frozen dataclasses that define `_work`.

    Attributes:
        kind: First words of the name, e.g. "merge task"; the name of the directory follows them.
    """

    kind: ClassVar[str]
    directory: Path

    @property
    def name(self) -> str:
        """Implements `Task.name`."""
        return f"{self.kind} {self.directory.name}"

    @property
    def finished(self) -> bool:
        """Implements `Task.finished`."""
        return (self.directory / MARKER).is_file()

    def run(self, report: Report) -> Marker:
        """Implements `Task.run`."""
        if (done := read_marker(self.directory)) is not None:
            return done
        with os_errors_as_data_errors(self.name), atomic_directory(self.directory) as scratch:
            done = self._work(scratch, report)
            # ASCII: file names in the marker may be invalid UTF-8
            (scratch / MARKER).write_text(json.dumps(with_checksum(done)), encoding="ascii")
        return done

    def _work(self, scratch: Path, report: Report) -> Marker:
        """Writes the result into `scratch`; returns the contents of the completion marker."""
        raise NotImplementedError


def scratch_path(final: Path) -> Path:
    """A unique temporary name beside `final`, which no process on any machine uses; `SCRATCH` matches it."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:12]}.partial")


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yields a scratch directory that is renamed to `final` if the block succeeds, and removed if it raises.

    If `final` then exists, another attempt of this task (speculative execution) was faster and wrote the same bytes:
    its result stays.
    """
    scratch = scratch_path(final)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            sync(path)
        try:
            scratch.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync(final.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def os_errors_as_data_errors(doing: str) -> Iterator[None]:
    """Converts an `OSError` into a `DataError` that says what to do.

    Args:
        doing: subject of the message: the task or action that failed, e.g. `map task 3`.
    """
    try:
        yield
    except OSError as error:
        remedy = "check the file and its permissions, then run again"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "make room, then run again: finished tasks are kept"
        raise DataError(f"{doing}: {error}\n  try: {remedy}") from error
