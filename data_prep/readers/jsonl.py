"""Lines of JSON: one object per line, plain or compressed, whole files or byte ranges of plain ones.

A line belongs to the range that holds its first byte, so ranges that cover a file read every line once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import orjson

from data_prep import storage
from data_prep.chat.conversation import canonical, why_no_conversation
from data_prep.readers.bytesource import DECOMPRESSION_ERRORS, DamagedFileError, Digest, open_bytes
from data_prep.readers.records import Bad, Batch, Wanted

_CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_NEWLINE = b"\n"


def read(
    path: str, *, source: str, file: str, start: int, end: int | None, wanted: Wanted, digest: Digest
) -> Iterator[Batch | Bad]:
    """Yields the records of the lines that start in bytes [start, end) of the decompressed file.

    Args:
        path: the file; `.gz` and `.zst` are decompressed and must be read whole (start 0, end None).
        source, file: how reports call it.
        end: None reads to the end of the file.
        wanted: keys of the object.
        digest: is shown the bytes.

    Raises:
        DamagedFileError: the compressed file ends too early; the records before the damage have been yielded.
    """
    batch, lines_before = Batch(), None
    try:
        for ordinal, (offset, line) in enumerate(_lines(path, start, end, digest)):
            record = _parsed(line, wanted)
            if isinstance(record, tuple):
                if batch.texts:
                    yield batch
                    batch = Batch()
                if lines_before is None:  # they are only counted for the sake of a report
                    lines_before = _count_lines(path, start)
                yield Bad(source, file, "line", lines_before + ordinal + 1, *record)
            elif record and batch.take(record, wanted, offset):
                yield batch
                batch = Batch()
    except DECOMPRESSION_ERRORS as error:
        if batch.texts:
            yield batch
        raise DamagedFileError(str(error)) from None
    if batch.texts:
        yield batch


def _parsed(line: memoryview, wanted: Wanted) -> dict[str, Any] | tuple[str, str] | None:
    """The object of a line; or the reason and the detail of its refusal; or None for a blank one."""
    try:
        record: dict[str, Any] = orjson.loads(line)
        if wanted.conversation:
            record[wanted.text] = canonical(record[wanted.text], record.get(wanted.tools or ""))
        if type(record[wanted.text]) is str and (wanted.id is None or isinstance(record[wanted.id], str | int)):
            return record
    except (ValueError, LookupError, TypeError):  # LookupError, TypeError: not an object, or without the field
        pass
    return _why(bytes(line), wanted)


def _why(line: bytes, wanted: Wanted) -> tuple[str, str] | None:
    """Reason and detail of a line that was refused; None for a blank one."""
    if not line.strip():
        return None
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _why_not_json(line, error)
    if not isinstance(record, dict):
        return "not an object", f"a JSON {type(record).__name__}"
    return _why_not_taken(record, wanted)


def _why_not_taken(record: dict[str, Any], wanted: Wanted) -> tuple[str, str]:
    if wanted.text not in record:
        return "no text field", f"no '{wanted.text}' among: {', '.join(list(record)[:8]) or 'no keys'}"
    if wanted.conversation and (refused := why_no_conversation(record[wanted.text])):
        return refused
    if not wanted.conversation and not isinstance(record[wanted.text], str):
        return "text is not a string", f"'{wanted.text}' is a {type(record[wanted.text]).__name__}"
    return "no id", f"'{wanted.id}' is missing, or no string or integer"


def _why_not_json(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as bad:
        return "not UTF-8", f"byte {line[bad.start]:#04x} at column {bad.start + 1}"
    return "not JSON", f"{error.msg}, column {error.colno}"


def _lines(path: str, start: int, end: int | None, digest: Digest) -> Iterator[tuple[int, memoryview]]:
    """Yields (byte offset, line without its newline) of the lines that start in [start, end).

    The views are of one buffer, which the next chunk overwrites.
    """
    with open_bytes(path, digest) as stream:
        # from the byte before the range on: it tells whether a line starts with the range
        position = max(0, start - 1)
        if position:
            stream.seek(position)
        skip_first = start > 0
        buffer, held = bytearray(2 * _CHUNK_BYTES), 0
        while count := _fill(stream, buffer, held):
            filled = held + count
            view = memoryview(buffer)
            first, stop = 0, buffer.find(_NEWLINE, held, filled)
            while stop >= 0:
                if not skip_first:
                    if end is not None and position + first >= end:
                        return
                    yield position + first, _without_mark(view[first:stop], position + first)
                skip_first, first = False, stop + 1
                stop = buffer.find(_NEWLINE, first, filled)
            if skip_first:
                first = filled  # of a line of another range nothing is kept
            held = filled - first
            buffer = _carry(buffer, first, filled)
            position += first
            if end is not None and position >= end:
                return
        if held and (end is None or position < end):
            yield position, _without_mark(memoryview(buffer)[:held], position)


def _fill(stream: io.RawIOBase, buffer: bytearray, held: int) -> int:
    """Reads behind what is held; at most a chunk."""
    return stream.readinto(memoryview(buffer)[held : held + _CHUNK_BYTES]) or 0


def _carry(buffer: bytearray, first: int, filled: int) -> bytearray:
    """The buffer with its unfinished line at the front, and room for a chunk behind it."""
    left = filled - first
    if left + _CHUNK_BYTES > len(buffer):  # by doubling: a line of n bytes is copied n bytes in all, not n^2
        grown = bytearray(2 * len(buffer))
        grown[:left] = memoryview(buffer)[first:filled]
        return grown
    if first:
        buffer[:left] = buffer[first:filled]
    return buffer


def _without_mark(line: memoryview, offset: int) -> memoryview:
    return line if offset or line[:3] != _BOM else line[3:]


def _count_lines(path: str, start: int) -> int:
    """Lines that start before `start`: those of the ranges before this one."""
    if start == 0:
        return 0
    with storage.open_raw(path) as stream:
        left, count = start - 1, 0
        while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            count += chunk.count(b"\n")
            left -= len(chunk)
    return count + 1
