"""Output of the readers: batches of texts, and unreadable records with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from data_prep.sources.bytesource import DAMAGE, DamagedFileError

Record = dict[str, Any]
"""A record of the input: field -> value."""

Problem = tuple[str, str]
"""Reason and detail for a record that cannot be used, as in `BadRecord`."""
BATCH_CHARACTERS = 1 << 20
"""Approximate size of a batch, in characters: large enough that the cost per batch is negligible."""
BATCH_DOCUMENTS = 4096


@dataclass(slots=True)
class TextBatch:
    """Texts of one unit, in order.

    Attributes:
        texts: the texts.
        at: position of each text in its file: the byte offset of its line, or its row number. It does not depend on the
            division into units. With the file, it identifies the document.
        fields: the other requested fields of each text's record; empty if none were requested.
        characters: total length of the texts.
    """

    texts: list[str] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    fields: list[Mapping[str, Any]] = field(default_factory=list)
    characters: int = 0

    def add(self, text: str, at: int) -> bool:
        """Adds a text; returns whether the batch is full."""
        self.texts.append(text)
        self.at.append(at)
        self.characters += len(text)
        return self.full

    def extended(self, other: TextBatch) -> TextBatch:
        """Returns a batch with the texts of both, in order. Reuses their lists: use neither afterwards."""
        if not self.texts:
            return other
        self.texts += other.texts
        self.at += other.at
        self.fields += other.fields
        self.characters += other.characters
        return self

    @property
    def full(self) -> bool:
        """Whether the batch has reached its size limit."""
        return self.characters >= BATCH_CHARACTERS or len(self.texts) >= BATCH_DOCUMENTS

    def add_record(self, record: Mapping[str, Any], wanted: WantedFields, at: int) -> bool:
        """Adds a record's text and its wanted fields; returns whether the batch is full."""
        if wanted.extra:
            self.fields.append({name: record.get(name) for name in wanted.extra})
        return self.add(record[wanted.text], at)


@dataclass(frozen=True)
class WantedFields:
    """The fields (jsonl) or columns (tables) to read from each record.

    A name with dots, such as `meta.text`, is a field of that name if a record has it, or else a path through objects.

    Attributes:
        text: field with the text, with the messages of a conversation or, if there is a `prompt`, with its answer.
        id: field of the document id, which every record must have; None: the position identifies the document.
        others: further fields, which may be missing.
        conversation: whether `text` holds messages, which are passed on as one line of JSON.
        prompt: for conversations of one turn, the fields of the user's message.
        tools: for conversations, the field with their tools, or None.
        max_bytes: length of the longest record to read (`max_record_bytes` of the config); None: no limit.
        reader: the user's reader as "module:function"; None for the reader of the source's type.
    """

    text: str
    id: str | None = None
    others: tuple[str, ...] = ()
    conversation: bool = False
    prompt: tuple[str, ...] = ()
    tools: str | None = None
    max_bytes: int | None = None
    reader: str | None = None

    @cached_property
    def extra(self) -> tuple[str, ...]:
        """All fields but the text (and the tools), each once."""
        return tuple(dict.fromkeys(([self.id] if self.id else []) + list(self.others)))

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns to read from a table."""
        return tuple(dict.fromkeys((*self.prompt, self.text, *([self.tools] if self.tools else []), *self.extra)))

    @cached_property
    def nested(self) -> tuple[str, ...]:
        """The wanted names that may be paths."""
        return tuple(name for name in self.columns if "." in name)

    @cached_property
    def nested_others(self) -> bool:
        """Whether a field that may be missing may also be a path."""
        return any("." in name for name in self.others)


def add_nested(record: Record, names: tuple[str, ...]) -> None:
    """Adds the values at paths such as `meta.text` to a record, where they exist, with the path as their name."""
    for name in names:
        if name in record:
            continue
        value: Any = record
        for part in name.split("."):
            value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            record[name] = value


_MISSING = object()


@dataclass(frozen=True, slots=True)
class BadRecord:
    """An unreadable record, or a damaged file or row group.

    Attributes:
        source, file: names of the source and the file.
        unit: kind of place that `at` numbers: "line", "row", "record", "row group" or "file".
        at: number of the line (from 1), row, record or row group (from 0), or None for the whole file.
        reason: reason from a fixed set; the manifest counts records by it.
        detail: free text.
    """

    source: str
    file: str
    unit: str
    at: int | None
    reason: str
    detail: str

    def place(self) -> str:
        """The position as text: `file:line`, `file, row 7` or `file`."""
        if self.at is None:
            return self.file
        return f"{self.file}:{self.at}" if self.unit == "line" else f"{self.file}, {self.unit} {self.at}"

    def listing(self) -> dict[str, Any]:
        """The record's line in skipped.jsonl."""
        return asdict(self)


def in_batches(
    found: Iterable[tuple[int, int, Record | Problem]], *, source: str, file: str, unit: str, wanted: WantedFields
) -> Iterator[TextBatch | BadRecord]:
    """Yields batches of records and unusable records, in order.

    Args:
        found: (position, number in reports, the record or why it cannot be used).
        source, file: names of the source and the file, for reports.
        unit: kind of place that the number in reports counts, e.g. "record".

    Raises:
        DamagedFileError: `found` has raised one of `DAMAGE`; the records before have been yielded.
    """
    batch = TextBatch()
    try:
        for at, number, record in found:
            if isinstance(record, dict):
                if batch.add_record(record, wanted, at):
                    yield batch
                    batch = TextBatch()
                continue
            if batch.texts:
                yield batch
                batch = TextBatch()
            yield BadRecord(source, file, unit, number, *record)
    except DAMAGE as error:
        if batch.texts:
            yield batch
        raise DamagedFileError(str(error)) from None
    if batch.texts:
        yield batch


TOO_LONG = "record too long"
"""Reason of a `BadRecord` longer than `max_record_bytes`."""


def too_long(found: str, *, limit: int) -> str:
    """The detail of a `BadRecord` with the reason `TOO_LONG`; `found`: the record's size and place."""
    return f"{found}, max_record_bytes is {limit:,}"


NO_TEXT = "no text field"
"""Reason of a `BadRecord` for a record that lacks its source's `text_field`, or has no text there."""
NOT_TEXT = "not text"
"""Reason of a `BadRecord` for a text file that has other data; the detail names the kind, and what to do."""
DAMAGED_FILE = "damaged file"
"""Reason of a `BadRecord` for the rest of a damaged file or row group; it counts against `max_bad_files`."""
