"""Opening a file as a stream of bytes, decompressed by suffix, with damage told apart from the end."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO

import zstandard

from headrace.errors import DataError

_CHUNK_BYTES = 1 << 20

DECOMPRESSION_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
"""What reading a damaged or truncated compressed file raises."""


class DamagedFileError(DataError):
    """A file that ends too early or cannot be decoded from some point on."""


class _Zstd(io.RawIOBase):
    """A zstd file as a raw stream; EOFError where it ends inside a frame, which zstandard's own reader passes over."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._rest = b""  # compressed bytes behind the end of the last frame
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._plain:
            if not self._more():
                return 0
        n = min(len(buffer), len(self._plain))
        buffer[:n], self._plain = self._plain[:n], self._plain[n:]
        return n

    def close(self) -> None:
        self._file.close()
        super().close()

    def _more(self) -> bool:
        chunk = self._rest or self._file.read(_CHUNK_BYTES)
        self._rest = b""
        if not chunk:
            if self._frame is not None:
                raise EOFError("the file ends inside a zstd frame")
            return False
        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._plain = memoryview(self._frame.decompress(chunk))
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return True


def open_bytes(path: str) -> io.BufferedIOBase:
    """Opens `path` for reading; `.gz` and `.zst` are decompressed.

    Raises:
        DamagedFileError: a compressed file of 0 bytes. What is read later may raise one of `DECOMPRESSION_ERRORS`.
    """
    if not path.endswith((".gz", ".zst")):
        return Path(path).open("rb")
    if Path(path).stat().st_size == 0:
        raise DamagedFileError("0 bytes: not even a header")
    if path.endswith(".gz"):
        return io.BufferedReader(gzip.open(path, "rb"), _CHUNK_BYTES)
    return io.BufferedReader(_Zstd(Path(path).open("rb")), _CHUNK_BYTES)
