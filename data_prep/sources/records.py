"""What readers give: batches of texts, and records that could not be read, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

BATCH_CHARACTERS = 1 << 20
"""About how much text is in a batch: enough that what is done once per batch costs little."""
BATCH_DOCUMENTS = 4096


@dataclass(slots=True)
class TextBatch:
    """Texts of one unit, in order.

    Attributes:
        texts: the texts.
        at: where each lies: the byte offset of its line, or the number of its row. It does not depend on how the input
            was cut, and names the document together with its file.
        fields: of each text, the other fields that were asked for; empty when none were.
        characters: of all texts.
    """

    texts: list[str] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    fields: list[Mapping[str, Any]] = field(default_factory=list)
    characters: int = 0

    def add(self, text: str, at: int) -> bool:
        """Adds a text; tells whether the batch is full."""
        self.texts.append(text)
        self.at.append(at)
        self.characters += len(text)
        return self.full

    def joined(self, other: TextBatch) -> TextBatch:
        """With those of another batch behind them; both are used up."""
        if not self.texts:
            return other
        self.texts += other.texts
        self.at += other.at
        self.fields += other.fields
        self.characters += other.characters
        return self

    @property
    def full(self) -> bool:
        """Whether it is large enough to be handed on."""
        return self.characters >= BATCH_CHARACTERS or len(self.texts) >= BATCH_DOCUMENTS

    def take(self, record: Mapping[str, Any], wanted: WantedFields, at: int) -> bool:
        """Adds a record's text and what else is wanted of it; tells whether the batch is full."""
        if wanted.extra:
            self.fields.append({name: record.get(name) for name in wanted.extra})
        return self.add(record[wanted.text], at)


@dataclass(frozen=True)
class WantedFields:
    """What is read of a record.

    Attributes:
        text: the field or column of the text.
        tools: where the text is a conversation, the field of its tools; None: there is none.
        conversation: whether `text` holds messages. They are handed on as one line of JSON.
        id: of the document's id, which must be there; None: the position is the id.
        others: further ones, which may be missing.
    """

    text: str
    id: str | None = None
    others: tuple[str, ...] = ()
    conversation: bool = False
    tools: str | None = None

    @cached_property
    def extra(self) -> tuple[str, ...]:
        """All but the text."""
        return tuple(dict.fromkeys(([self.id] if self.id else []) + list(self.others)))

    @property
    def columns(self) -> tuple[str, ...]:
        """All that is read of a table."""
        return tuple(dict.fromkeys((self.text, *([self.tools] if self.tools else []), *self.extra)))


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record (or a whole file) that was not readable.

    at: the line (counted from 1), row or row group (from 0), or None for the whole file. unit: what `at` counts.
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
"""The reason of a `BadRecord` that stands for the rest of a file or of a row group: counted against `max_bad_files`."""
