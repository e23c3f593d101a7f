"""Where a conversation that is refused lies: documents are known by their byte, and reported by their line."""

from __future__ import annotations

from functools import lru_cache

from data_prep.sources.bytesource import Digest, open_bytes
from data_prep.sources.units import Unit

_CHUNK_BYTES = 1 << 20


def place_of(unit: Unit, at: int) -> tuple[str, int]:
    """What counts the documents of a unit ("line", "row"), and the number there of the one `at`."""
    return ("line", _open(unit.path, unit.file_version).at(at)) if unit.type == "jsonl" else ("row", at)


class LineNumbers:
    """Line numbers, from 1, of byte offsets in a decompressed file.

    Asked for in ascending order, they take one more reading of the file, as far as the last of them.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._rewind()

    def at(self, offset: int) -> int:
        """The number of the line that starts at `offset`."""
        if offset < self._passed:
            self._stream.close()
            self._rewind()
        while self._passed < offset and (chunk := self._stream.read(min(offset - self._passed, _CHUNK_BYTES))):
            self._line += chunk.count(b"\n")
            self._passed += len(chunk)
        return self._line

    def _rewind(self) -> None:
        self._stream = open_bytes(self._path, Digest(self._path, start=0, end=0))
        self._passed, self._line = 0, 1


@lru_cache(maxsize=1)
def _open(path: str, version: str) -> LineNumbers:  # noqa: ARG001 - a file that was written anew is another
    return LineNumbers(path)
