"""Reads files in blocks of whole lines: plain or compressed files, or byte ranges of plain files.

A line belongs to the byte range with its first byte: ranges that cover a file yield every line once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from data_prep.sources import storage
from data_prep.sources.bytesource import Digest, open_bytes

_CHUNK_BYTES = 1 << 20
_NEWLINE = b"\n"


@dataclass(frozen=True, slots=True)
class SkippedLine:
    """A line that was too long; `bytes` is its size, without the newline."""

    bytes: int


def blocks(  # noqa: C901 - one loop over the chunks of a file, with three things that may continue from the last one
    path: str, start: int, end: int | None, digest: Digest, *, max_bytes: int | None = None
) -> Iterator[tuple[int, memoryview | SkippedLine]]:
    """Yields (byte offset, whole lines with their newlines) of the lines that start in [start, end).

    The last line of a file may lack a newline. The views share one buffer, which the next block overwrites.

    Args:
        max_bytes: length above which a line that does not fit into the buffer is skipped; its size is yielded instead.
            The buffer grows to at most twice this size; a line that fits is always yielded. None: no limit.
    """
    if end == 0:
        return
    with open_bytes(path, digest) as stream:
        # start at the byte before the range: it shows whether a line starts with the range
        position = max(0, start - 1)
        if position:
            stream.seek(position)
        in_foreign_line = start > 0  # within a line of the previous range
        long_line: int | None = None  # the offset of a line to skip
        buffer, kept = bytearray(2 * _CHUNK_BYTES), 0
        while count := _fill(stream, buffer, kept):
            new, filled, first = kept, kept + count, 0
            if in_foreign_line or long_line is not None:  # discard it
                first = buffer.find(_NEWLINE, 0, filled) + 1
                if first and long_line is not None:
                    yield long_line, SkippedLine(position + first - 1 - long_line)
                in_foreign_line, long_line = in_foreign_line and not first, None if first else long_line
                first = first or filled
            stop = _end_of_lines(buffer, max(first, new), filled, None if end is None else end - position)
            if stop > first:
                yield position + first, memoryview(buffer)[first:stop]
            first = max(first, stop)
            if max_bytes is not None and filled - first > max_bytes and (end is None or position + first < end):
                long_line, first = position + first, filled
            kept = filled - first
            buffer = _move_to_front(buffer, first, filled)
            position += first
            if end is not None and position >= end and long_line is None:
                return
        if long_line is not None:
            yield long_line, SkippedLine(position - long_line)
        if kept and (end is None or position < end):
            yield position, memoryview(buffer)[:kept]


def count_lines(path: str, start: int) -> int:
    """Counts the lines that start before byte `start`, i.e. in earlier ranges."""
    if start == 0:
        return 0
    with storage.open_raw(path) as stream:
        remaining, count = start - 1, 0
        while remaining and (chunk := stream.read(min(remaining, _CHUNK_BYTES))):
            count += chunk.count(b"\n")
            remaining -= len(chunk)
    return count + 1


def _end_of_lines(buffer: bytearray, new: int, filled: int, limit: int | None) -> int:
    """End of the last whole line that starts before `limit`, or 0. The buffer before `new` contains no newline."""
    stop = buffer.rfind(_NEWLINE, new, filled) + 1
    return stop if limit is None or stop <= limit else buffer.find(_NEWLINE, max(0, limit - 1), filled) + 1


def _fill(stream: io.RawIOBase, buffer: bytearray, kept: int) -> int:
    """Reads at most a chunk after the `kept` bytes; returns the number of bytes read."""
    return stream.readinto(memoryview(buffer)[kept : kept + _CHUNK_BYTES]) or 0


def _move_to_front(buffer: bytearray, first: int, filled: int) -> bytearray:
    """Moves the unfinished line to the front of the buffer, which is enlarged if a chunk does not fit after it."""
    left = filled - first
    if left + _CHUNK_BYTES > len(buffer):  # by doubling: a line of n bytes costs O(n) copied bytes, not O(n^2)
        grown = bytearray(2 * len(buffer))
        grown[:left] = memoryview(buffer)[first:filled]
        return grown
    if first:
        buffer[:left] = buffer[first:filled]
    return buffer
