"""`Task`: the seam between the work and who schedules it.

A task is a small frozen value that pickles. `run` does all its work, leaves its result on disk under one rename, and
gives the same bytes whoever runs it, how often, and beside whom; running one that is done only reads its marker. So an
executor needs no knowledge of tasks, and may run one twice.
"""

from __future__ import annotations

import errno
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headrace.base.directory import sync
from headrace.base.errors import DataError


@dataclass(frozen=True, slots=True)
class Counts:
    """Work done since the last report.

    input_bytes: as stored; text_bytes: UTF-8 of the documents; dropped: documents left out, by reason.
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
"""In the directory of a finished task: what it said."""
SCRATCH = ".*.partial*"
"""What a killed task may leave behind, as a glob."""

Report = Callable[[Counts], None]


class Task(Protocol):
    """One piece of a job."""

    @property
    def name(self) -> str:
        """What messages call it, e.g. `map 3`."""

    @property
    def finished(self) -> bool:
        """Whether its result is there."""

    def run(self, report: Report) -> dict[str, Any]:
        """Does the work unless it is done already; returns what the marker says.

        Raises:
            DataError: the input is not usable, or there is no room for the output.
        """


def read_marker(directory: Path) -> dict[str, Any] | None:
    """What a finished task said, or None when it has not finished."""
    try:
        done: dict[str, Any] = json.loads((directory / MARKER).read_text())
    except FileNotFoundError:
        return None
    return done


class DirectoryTask:
    """A task whose result is a directory: what all of them have in common. To be derived from by frozen dataclasses."""

    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """See `Task.finished`."""
        return (self.directory / MARKER).is_file()

    def run(self, report: Report) -> dict[str, Any]:
        """See `Task.run`."""
        if (done := read_marker(self.directory)) is not None:
            return done
        with os_errors_as_data_errors(self.name), atomic_directory(self.directory) as scratch:
            done = self._work(scratch, report)
            # ASCII: a file's name need not be UTF-8
            (scratch / MARKER).write_text(json.dumps(done), encoding="ascii")
        return done

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        """Writes the result into `scratch`; returns what the marker is to say."""
        raise NotImplementedError


def scratch_path(final: Path) -> Path:
    """A name beside `final` that no other process, on any machine, writes to; `SCRATCH` matches all of them."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:12]}.partial")


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Gives a scratch directory that becomes `final` when the block ends well, and is removed when it does not.

    When `final` has appeared meanwhile, a twin of this task was faster, with the same bytes: its result stays.
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
    """Turns what the operating system refuses into a `DataError` that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = "check the file and its permissions, then run again"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "make room, then run again: finished tasks are kept"
        raise DataError(f"{doing}: {error}\n  try: {remedy}") from error
