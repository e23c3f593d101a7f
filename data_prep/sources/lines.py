"""Files cut into blocks of whole lines, plain or compressed, whole files or byte ranges of plain ones.

A line belongs to the range that holds its first byte, so ranges that cover a file give every line once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from data_prep.sources import storage
from data_prep.sources.bytesource import Digest, open_bytes

_CHUNK_BYTES = 1 << 20
_NEWLINE = b"\n"


def blocks(path: str, start: int, end: int | None, digest: Digest) -> Iterator[tuple[int, memoryview]]:
    """Yields (byte offset, whole lines with their newlines) of the lines that start in [start, end).

    The last line of a file may be without a newline. The views are of one buffer, which the next block overwrites.
    """
    if end == 0:
        return
    with open_bytes(path, digest) as stream:
        # from the byte before the range on: it tells whether a line starts with the range
        position = max(0, start - 1)
        if position:
            stream.seek(position)
        within = start > 0  # a line of another range
        buffer, held = bytearray(2 * _CHUNK_BYTES), 0
        while count := _fill(stream, buffer, held):
            new, filled, first = held, held + count, 0
            if within:  # of a line of another range nothing is kept
                first = buffer.find(_NEWLINE, 0, filled) + 1
                within, first = not first, first or filled
            stop = _end_of_lines(buffer, max(first, new), filled, None if end is None else end - position)
            if stop > first:
                yield position + first, memoryview(buffer)[first:stop]
            first = max(first, stop)
            held = filled - first
            buffer = _carry(buffer, first, filled)
            position += first
            if end is not None and position >= end:
                return
        if held and (end is None or position < end):
            yield position, memoryview(buffer)[:held]


def count_lines(path: str, start: int) -> int:
    """Lines that start before `start`: those of the ranges before this one."""
    if start == 0:
        return 0
    with storage.open_raw(path) as stream:
        left, count = start - 1, 0
        while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            count += chunk.count(b"\n")
            left -= len(chunk)
    return count + 1


def _end_of_lines(buffer: bytearray, new: int, filled: int, limit: int | None) -> int:
    """Where the last whole line that starts before `limit` ends, or 0. Of what is before `new` no line has an end."""
    stop = buffer.rfind(_NEWLINE, new, filled) + 1
    return stop if limit is None or stop <= limit else buffer.find(_NEWLINE, max(0, limit - 1), filled) + 1


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
