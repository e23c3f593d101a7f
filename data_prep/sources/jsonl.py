"""JSON Lines reader: one object per line, from plain or compressed files, or byte ranges of plain files.

A C extension (`_jsonl.c`) reads well-formed lines and creates only the requested strings, in a third of orjson's time.
orjson parses the lines that it skips, or all lines where it could not be compiled: the result is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import orjson

from data_prep.sources import json_array
from data_prep.sources.bytesource import DECOMPRESSION_ERRORS, DamagedFileError, Digest
from data_prep.sources.conversation import ConversationError, conversation_hint, conversation_line, prompt_and_answer
from data_prep.sources.lines import SkippedLine, blocks, count_lines
from data_prep.sources.magic import HEAD_BYTES, described
from data_prep.sources.records import (
    BATCH_DOCUMENTS,
    NO_TEXT,
    TOO_LONG,
    BadRecord,
    Problem,
    Record,
    TextBatch,
    WantedFields,
    add_nested,
    in_batches,
    too_long,
)

try:
    from data_prep.sources import _jsonl as extension
except ImportError:  # there was no compiler at installation
    extension = None  # type: ignore[assignment]
if getattr(extension, "VERSION", None) != 1:  # compiled from another version of its source
    extension = None  # type: ignore[assignment]

_BOM = b"\xef\xbb\xbf"
_NEWLINE = 10

Columns = Sequence[Sequence[str | None]]


class _BadLine(NamedTuple):
    """A line that cannot be used; `line`: its index in the block."""

    line: int
    reason: str
    detail: str


def read(
    path: str, *, source: str, file: str, start: int, end: int | None, wanted: WantedFields, digest: Digest
) -> Iterator[TextBatch | BadRecord]:
    """Yields the records of the lines that start in bytes [start, end) of the decompressed file, or of its array.

    Args:
        path: the file; a compressed one and a JSON array must be read whole (start 0, end None).
        source, file: names of the source and the file in reports.
        start, end: byte range; end None reads to the end of the file.
        wanted: keys of the object to read.
        digest: digest to update with the stored bytes that are read.

    Raises:
        DamagedFileError: the compressed file is truncated or damaged; the records before have been yielded.
    """
    if end is None and not start and json_array.is_array(path):
        return _read_array(path, source=source, file=file, wanted=wanted, digest=digest)
    return _read_lines(path, source=source, file=file, start=start, end=end, wanted=wanted, digest=digest)


def _read_lines(
    path: str, *, source: str, file: str, start: int, end: int | None, wanted: WantedFields, digest: Digest
) -> Iterator[TextBatch | BadRecord]:
    batch, lines = TextBatch(), 0
    lines_before = cache(count_lines)  # counted only if a bad line is reported
    try:
        for offset, block in blocks(path, start, end, digest, max_bytes=wanted.max_bytes):
            records, count = _block_records(path, offset, block, wanted)
            for record in records:
                if isinstance(record, TextBatch):
                    batch = batch.extended(record)
                    if not batch.full:
                        continue
                if batch.texts:
                    yield batch
                    batch = TextBatch()
                if isinstance(record, _BadLine):
                    line = lines_before(path, start) + lines + record.line + 1
                    yield BadRecord(source, file, "line", line, record.reason, record.detail)
            lines += count
    except DECOMPRESSION_ERRORS as error:
        if batch.texts:
            yield batch
        raise DamagedFileError(str(error)) from None
    if batch.texts:
        yield batch


def _read_array(
    path: str, *, source: str, file: str, wanted: WantedFields, digest: Digest
) -> Iterator[TextBatch | BadRecord]:
    """Yields the records of a JSON array, like `read`; unreadable ones are reported by their first line."""
    found = json_array.elements(path, digest, max_bytes=wanted.max_bytes)
    records = ((element.offset, element.line, _array_record(element, wanted)) for element in found)
    return in_batches(records, source=source, file=file, unit="line", wanted=wanted)


def _array_record(element: json_array.ArrayElement, wanted: WantedFields) -> Record | Problem:
    if element.content is None:
        return TOO_LONG, _too_long(element.size, element.offset, wanted)
    return _parse(memoryview(element.content), wanted) or ("not JSON", "nothing between two commas")


def _block_records(
    path: str, offset: int, block: memoryview | SkippedLine, wanted: WantedFields
) -> tuple[Iterable[TextBatch | _BadLine], int]:
    """The records of a block from `lines.blocks`, and the number of its lines."""
    if isinstance(block, SkippedLine):
        return [_BadLine(0, TOO_LONG, _too_long(block.bytes, offset, wanted))], 1
    if not offset and (what := described(bytes(block[:HEAD_BYTES]), path)) is not None:
        raise DamagedFileError(f"not lines of JSON but {what}")
    columns, starts = _strings(block, wanted)
    return _records(block, offset, columns, starts, wanted), len(starts)


def _strings(block: memoryview, wanted: WantedFields) -> tuple[Columns, list[int]]:
    """Reads a block's lines with the C extension, as far as it can.

    Returns:
        A list of strings for `wanted.text` and for each of `wanted.extra`, one entry per line, with None for lines that
        orjson has to parse; and the offsets at which the lines start.
    """
    keys = wanted.text, *wanted.extra
    if extension is not None and not wanted.conversation and not wanted.nested_others and _supported(keys):
        *columns, starts = extension.strings(block, keys, 1 if wanted.id is None else 2)
        found = np.frombuffer(starts, np.int64)
        if wanted.max_bytes is not None and len(block) > wanted.max_bytes:  # take no line that is too long
            sizes = np.diff(found, append=len(block))
            for i in np.flatnonzero(sizes > wanted.max_bytes).tolist():
                columns[0][i] = None
        return columns, found.tolist()
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)
    offsets = [0, *(ends + 1).tolist()]
    if offsets[-1] == len(block):
        offsets.pop()
    return [[None] * len(offsets)] * len(keys), offsets


@cache
def _supported(keys: tuple[str, ...]) -> bool:
    """Whether the extension can read these keys."""
    try:
        "".join(keys).encode()
    except UnicodeEncodeError:
        return False
    return len(set(keys)) == len(keys) <= extension.MAX_KEYS and not any("\\" in key for key in keys)


def _records(
    block: memoryview, offset: int, columns: Columns, starts: list[int], wanted: WantedFields
) -> Iterator[TextBatch | _BadLine]:
    """The records of a block's lines, in order; lines that the extension skipped are parsed here."""
    texts, *extra = columns
    found = [text for text in texts if text is not None]
    if len(found) == len(texts) <= BATCH_DOCUMENTS:
        fields: list[Mapping[str, Any]] = [
            dict(zip(wanted.extra, row, strict=True)) for row in zip(*extra, strict=True)
        ]
        yield TextBatch(found, [offset + start for start in starts], fields, sum(map(len, found)))
        return
    batch = TextBatch()
    for i, (text, start, stop) in enumerate(zip(texts, starts, [*starts[1:], len(block)], strict=True)):
        if batch.full:
            yield batch
            batch = TextBatch()
        if text is not None:
            if extra:
                batch.fields.append(dict(zip(wanted.extra, (column[i] for column in extra), strict=True)))
            batch.add(text, offset + start)
            continue
        line = block[start : stop - (block[stop - 1] == _NEWLINE)]
        if wanted.max_bytes is not None and len(line) > wanted.max_bytes:
            yield batch
            batch = TextBatch()
            yield _BadLine(i, TOO_LONG, _too_long(len(line), offset + start, wanted))
            continue
        record = _parse(line if offset + start or line[:3] != _BOM else line[3:], wanted)
        if isinstance(record, tuple):
            yield batch
            batch = TextBatch()
            yield _BadLine(i, *record)
        elif record:
            batch.add_record(record, wanted, offset + start)
    yield batch


def _too_long(size: int, offset: int, wanted: WantedFields) -> str:
    return too_long(f"{size:,} bytes from byte {offset:,} on", limit=wanted.max_bytes or 0)


def _parse(line: memoryview, wanted: WantedFields) -> Record | tuple[str, str] | None:
    """Parses a line: the object, or (reason, detail) if it cannot be used, or None for a blank line."""
    try:
        if (record := _usable(orjson.loads(line), wanted)) is not None:
            return record
    except ValueError:
        pass
    return _problem(bytes(line), wanted)


def checked(record: Record, wanted: WantedFields) -> Record | Problem:
    """Checks a record assembled from parts of another file as if it were a line; returns it, or the problem."""
    add_nested(record, wanted.nested)
    return _usable({**record}, wanted) or _record_problem(record, wanted)


def _usable(record: Record, wanted: WantedFields) -> Record | None:
    """Adds nested fields and the conversation's line to a record in place; None if it cannot be used."""
    try:
        add_nested(record, wanted.nested)
        if wanted.conversation:
            record[wanted.text] = _conversation(record, wanted)
        if type(record[wanted.text]) is str and (wanted.id is None or isinstance(record[wanted.id], str | int)):
            return record
    except (ValueError, LookupError, TypeError):  # LookupError, TypeError: not an object, or the field is missing
        pass
    return None


def _conversation(record: Record, wanted: WantedFields) -> str:
    messages = record[wanted.text]
    if wanted.prompt:
        messages = prompt_and_answer([record.get(name) for name in wanted.prompt], messages)
    return conversation_line(messages, record.get(wanted.tools or ""))


def _problem(line: bytes, wanted: WantedFields) -> tuple[str, str] | None:
    """Reason and detail of a line that cannot be used; None for a blank line."""
    if not line.strip():
        return None
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _syntax_problem(line, error)
    if not isinstance(record, dict):
        return "not an object", f"a JSON {type(record).__name__}"
    add_nested(record, wanted.nested)
    return _record_problem(record, wanted)


def _record_problem(record: Record, wanted: WantedFields) -> tuple[str, str]:
    if wanted.text not in record:
        hint = "" if wanted.conversation else conversation_hint(record)
        return NO_TEXT, f"no '{wanted.text}' among: {', '.join(list(record)[:8]) or 'no keys'}{hint}"
    try:
        if wanted.conversation:
            _conversation(record, wanted)
    except (ConversationError, TypeError) as error:
        return "not a conversation", str(error)
    if not wanted.conversation and not isinstance(record[wanted.text], str):
        return "text is not a string", f"'{wanted.text}' is a {type(record[wanted.text]).__name__}"
    return "no id", f"'{wanted.id}' is missing, or neither a string nor an integer"


def _syntax_problem(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as bad:
        return "not UTF-8", f"byte {line[bad.start]:#04x} at column {bad.start + 1}"
    return "not JSON", f"{error.msg}, column {error.colno}"
