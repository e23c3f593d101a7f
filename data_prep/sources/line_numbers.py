"""Line numbers for error reports: byte offsets identify jsonl documents, but reports name lines."""

from __future__ import annotations

from functools import lru_cache

from data_prep.sources.bytesource import Digest, open_bytes
from data_prep.sources.units import Unit

_CHUNK_BYTES = 1 << 20


def record_position(unit: Unit, at: int) -> tuple[str, int]:
    """Position of a document for reports: ("line", n from 1) for jsonl, else ("record" or "row", n from 0)."""
    if unit.type == "jsonl":
        return "line", _open(unit.path, unit.file_version).line_of(at)
    return "record" if unit.type in ("warc", "webdataset") else "row", at


class LineNumbers:
    """Line numbers, from 1, of byte offsets in a decompressed file.

    Queries in ascending order read the file once, up to the last offset.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._rewind()

    def line_of(self, offset: int) -> int:
        """Number of the line that starts at `offset`."""
        if offset < self._offset:
            self._stream.close()
            self._rewind()
        while self._offset < offset and (chunk := self._stream.read(min(offset - self._offset, _CHUNK_BYTES))):
            self._line += chunk.count(b"\n")
            self._offset += len(chunk)
        return self._line

    def _rewind(self) -> None:
        self._stream = open_bytes(self._path, Digest(self._path, start=0, end=0))
        self._offset, self._line = 0, 1


@lru_cache(maxsize=1)
def _open(path: str, version: str) -> LineNumbers:  # noqa: ARG001 - the version invalidates the cache when the file is rewritten
    return LineNumbers(path)
