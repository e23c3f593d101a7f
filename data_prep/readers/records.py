"""What readers give: documents, and records that could not be read, each with its reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its stable name: source, file, and the position in the file."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Bad:
    """A record (or a whole file) that was not readable.

    at: the line (counted from 1) or row (from 0), or None for the whole file. unit: what `at` counts.
    """

    source: str
    file: str
    unit: str
    at: int | None
    reason: str
    detail: str

    def place(self) -> str:
        """`file:line`, `file, row 7` or `file`."""
        if self.at is None:
            return self.file
        return f"{self.file}:{self.at}" if self.unit == "line" else f"{self.file}, {self.unit} {self.at}"

    def listing(self) -> dict[str, Any]:
        """The record's line in skipped.jsonl."""
        return asdict(self)


DAMAGED_FILE = "damaged file"
"""The reason of a `Bad` that stands for the rest of a file: counted against `max_bad_files`."""
