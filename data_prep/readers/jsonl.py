"""Lines of JSON: one object per line, plain or compressed, whole files or byte ranges of plain ones.

A line belongs to the range that holds its first byte, so ranges that cover a file read every line once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from data_prep.readers.bytesource import DECOMPRESSION_ERRORS, DamagedFileError, open_bytes
from data_prep.readers.records import Bad, Document

_CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


def read(
    path: str, *, source: str, file: str, start: int, end: int | None, text_field: str, id_field: str | None
) -> Iterator[Document | Bad]:
    """Yields the records of the lines that start in bytes [start, end) of the decompressed file.

    Args:
        path: the file; `.gz` and `.zst` are decompressed and must be read whole (start 0, end None).
        source, file: how ids and reports call it.
        end: None reads to the end of the file.
        text_field, id_field: keys of the object. Without `id_field` the id is the byte offset of the line.

    Raises:
        DamagedFileError: the compressed file ends too early; the records before the damage have been yielded.
    """
    first_line: int | None = None
    for ordinal, offset, line in _lines(path, start, end):
        if not line.strip():
            continue
        try:
            text, given_id = _fields(line, text_field, id_field)
        except _RefusedError as refused:
            if first_line is None:  # lines before a range are only counted for the sake of a report
                first_line = _count_lines(path, start) + 1
            yield Bad(source, file, "line", first_line + ordinal, refused.reason, refused.detail)
            continue
        yield Document(f"{source}/{given_id}" if id_field else f"{source}/{file}#{offset}", text)


class _RefusedError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def _fields(line: bytes, text_field: str, id_field: str | None) -> tuple[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _why_not_json(line, error) from None
    if not isinstance(record, dict):
        raise _RefusedError("not an object", f"a JSON {type(record).__name__}")
    if text_field not in record:
        raise _RefusedError("no text field", f"no '{text_field}' among: {', '.join(list(record)[:8]) or 'no keys'}")
    text = record[text_field]
    if not isinstance(text, str):
        raise _RefusedError("text is not a string", f"'{text_field}' is a {type(text).__name__}")
    if id_field is not None and not isinstance(record.get(id_field), str | int):
        raise _RefusedError("no id", f"'{id_field}' is missing, or no string or integer")
    return text, record[id_field] if id_field else None


def _why_not_json(line: bytes, error: orjson.JSONDecodeError) -> _RefusedError:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as bad:
        return _RefusedError("not UTF-8", f"byte {line[bad.start]:#04x} at column {bad.start + 1}")
    return _RefusedError("not JSON", f"{error.msg}, column {error.colno}")


def _lines(path: str, start: int, end: int | None) -> Iterator[tuple[int, int, bytes]]:
    """Yields (ordinal in the range, byte offset, line)."""
    with open_bytes(path) as stream:
        offset = _seek_line(stream, start)
        ordinal = 0
        while end is None or offset < end:
            try:
                line = stream.readline()
            except DECOMPRESSION_ERRORS as error:
                raise DamagedFileError(str(error)) from None
            if not line:
                return
            yield ordinal, offset, line.removeprefix(_BOM) if offset == 0 else line
            ordinal += 1
            offset += len(line)


def _seek_line(stream: io.BufferedIOBase, start: int) -> int:
    """Goes to the first line that starts at `start` or later; returns its offset."""
    if start == 0:
        return 0
    stream.seek(start - 1)
    return start - 1 + len(stream.readline())


def _count_lines(path: str, start: int) -> int:
    """Lines that start before `start`: those of the ranges before this one."""
    if start == 0:
        return 0
    with Path(path).open("rb") as stream:
        left, count, last = start - 1, 0, b""
        while left and (last := stream.read(min(left, _CHUNK_BYTES))):
            count += last.count(b"\n")
            left -= len(last)
    return count + 1
