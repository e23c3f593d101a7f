"""Reads `.json` files that hold one array of records, element by element, in memory for the longest element.

Brackets and strings are matched only to find where an element ends; the reader of JSON Lines parses each element.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from data_prep.sources import storage
from data_prep.sources.bytesource import DAMAGE, DamagedFileError, Digest, open_bytes

_CHUNK_BYTES, _PEEK_BYTES = 1 << 20, 4096
_BOM = b"\xef\xbb\xbf"
_UNREADABLE: tuple[type[Exception], ...] = (*DAMAGE, OSError)
_SPACE = b" \t\r\n"
_STRUCTURE = re.compile(rb'[\[\]{},"]')
_IN_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ArrayElement:
    """An element of an array.

    Attributes:
        offset: offset of its first byte in the decompressed file.
        line: number of its first line, from 1.
        size: size in bytes.
        content: its bytes; None if it is longer than the limit.
    """

    offset: int
    line: int
    size: int
    content: bytes | None


def is_array(path: str) -> bool:
    """Whether a file is named `*.json` (possibly with a compression suffix) and begins with a bracket."""
    name = path
    for suffix in storage.COMPRESSED:
        name = name.removesuffix(suffix)
    if not name.endswith(".json"):
        return False
    try:
        with open_bytes(path, Digest(path, start=0, end=0)) as stream:
            return (stream.read(_PEEK_BYTES) or b"").removeprefix(_BOM).lstrip(_SPACE)[:1] == b"["
    except _UNREADABLE:
        return False  # the reader reports it


def elements(path: str, digest: Digest, *, max_bytes: int | None = None) -> Iterator[ArrayElement]:
    """Yields the elements of the array in a file.

    Args:
        digest: digest to update with the stored bytes that are read.
        max_bytes: largest element whose content is kept; longer ones are yielded without it. None: no limit.

    Raises:
        DamagedFileError: the array does not end, or something follows it; the elements before have been yielded.
    """
    with open_bytes(path, digest) as stream:
        yield from _Scanner(stream, max_bytes).elements()


class _Scanner:
    """Finds the elements of an array in a stream. Every byte is scanned only once, even in unfinished elements."""

    def __init__(self, stream: io.RawIOBase, max_bytes: int | None) -> None:
        self._stream, self._max_bytes = stream, max_bytes
        self._buffer, self._position = bytearray(), 0  # the buffer, and its position in the file
        self._first, self._at = 0, 0  # in the buffer: beginning of the element, end of the scanned bytes
        self._lines, self._counted = 1, 0  # number of the line at byte `_counted` of the buffer
        self._long: tuple[int, int] | None = None  # offset and line of an element too long to keep
        self._depth, self._in_string = 0, False

    def elements(self) -> Iterator[ArrayElement]:
        while (ended := self._next()) is None or self._depth:
            if ended is None and not self._fill():
                raise DamagedFileError(f"the array does not end: the file does, after {self._position:,} bytes")
            if ended:
                yield from self._element()
        yield from self._element()
        end = self._position + self._at
        while not self._buffer[self._at :].strip(_SPACE):
            self._first = self._at = len(self._buffer)
            if not self._fill():
                return
        raise DamagedFileError(f"there is more after the array, which ends at byte {end:,}")

    def _next(self) -> bool | None:
        """Scans up to the next bracket, comma or end of a string.

        Returns:
            Whether an element ends there; None if the buffer holds none of these three.
        """
        if self._in_string:
            match = _IN_STRING.match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            if self._buffer[self._at : self._at + 1] != b'"':
                return None
            self._at, self._in_string = self._at + 1, False
            return False
        found = _STRUCTURE.search(self._buffer, self._at)
        if found is None:
            self._at = len(self._buffer)
            return None
        self._at = found.end()
        return self._step(found.group())

    def _step(self, token: bytes) -> bool:
        self._in_string = token == b'"'
        if token in b"[{":
            self._depth += 1
            if self._depth == 1:
                self._first = self._at
        elif token in b"]}":
            self._depth -= 1
        return self._depth == 0 or (token == b"," and self._depth == 1)

    def _element(self) -> Iterator[ArrayElement]:
        """Yields the element that ends before the last scanned byte, unless it is blank."""
        end = self._position + self._at - 1
        if self._long is not None:
            yield ArrayElement(*self._long, end - self._long[0], None)
        elif content := bytes(self._buffer[self._first : self._at - 1]).strip(_SPACE):
            long = self._max_bytes is not None and len(content) > self._max_bytes
            yield ArrayElement(*self._place(), len(content), None if long else content)
        self._first, self._long = self._at, None

    def _place(self) -> tuple[int, int]:
        """Offset and line of the element's first byte that is not blank."""
        begin = self._first
        while self._buffer[begin] in _SPACE:
            begin += 1
        return self._position + begin, self._count_lines(begin)

    def _count_lines(self, until: int) -> int:
        """Counts lines up to a byte of the buffer; queries must be in ascending order."""
        self._lines += self._buffer.count(b"\n", self._counted, until)
        self._counted = until
        return self._lines

    def _fill(self) -> bool:
        """Reads a chunk after dropping bytes that are no longer needed; returns False at the end of the file."""
        if self._max_bytes is not None and self._at - self._first > self._max_bytes and self._long is None:
            blank = not self._buffer[self._first : self._at].strip(_SPACE)
            self._long = None if blank else self._place()
        dropped = self._first if self._long is None else self._at
        self._count_lines(dropped)
        del self._buffer[:dropped]
        self._position += dropped
        self._at, self._counted, self._first = self._at - dropped, 0, 0
        chunk = self._stream.read(_CHUNK_BYTES) or b""
        self._buffer += chunk
        return bool(chunk)
