"""Opening a file as a stream of bytes, decompressed by suffix, hashed on the way, with damage told from the end."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import BinaryIO, cast

import xxhash
import zstandard
from isal import igzip, isal_zlib

from data_prep import storage
from headrace.errors import DataError

_CHUNK_BYTES = 1 << 20

DECOMPRESSION_ERRORS: tuple[type[Exception], ...] = (
    *(EOFError, zlib.error, cast(type[Exception], isal_zlib.error)),
    *(gzip.BadGzipFile, zstandard.ZstdError),
)
"""What reading a damaged or truncated compressed file raises."""


class DamagedFileError(DataError):
    """A file that ends too early or cannot be decoded from some point on."""


class Digest:
    """XXH3-128 of bytes [start, end) of a file as stored, taken while they are read for another purpose."""

    def __init__(self, path: str, *, start: int, end: int) -> None:
        self._path, self._start, self._next, self._end = path, start, start, end
        self._hash = xxhash.xxh3_128()

    @property
    def passed(self) -> int:
        """How many bytes it has been shown."""
        return self._next - self._start

    def pass_by(self, data: memoryview, at: int) -> None:
        """Takes bytes that were read at offset `at`, as far as they are the next ones."""
        first, last = self._next - at, min(self._end - at, len(data))
        if 0 <= first < last:
            self._hash.update(data[first:last])
            self._next += last - first

    def finish(self) -> str:
        """Reads what nobody has read, and returns the sum in hexadecimal."""
        if self._next < self._end:
            with storage.open_raw(self._path) as file:
                file.seek(self._next)
                while self._next < self._end and (chunk := file.read(min(self._end - self._next, _CHUNK_BYTES))):
                    self.pass_by(memoryview(chunk), self._next)
        return self._hash.hexdigest()


class Passing(io.RawIOBase):
    """A file as a raw stream that shows what it reads to a `Digest`."""

    def __init__(self, file: BinaryIO, digest: Digest) -> None:
        self._file, self._digest, self._at = file, digest, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = self._file.seek(offset, whence)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer) or 0  # type: ignore[attr-defined]
        self._digest.pass_by(memoryview(buffer)[:count], self._at)
        self._at += count
        return int(count)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Zstd(io.RawIOBase):
    """A zstd file as a raw stream; EOFError where it ends inside a frame, which zstandard's own reader passes over."""

    def __init__(self, file: io.RawIOBase) -> None:
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


def open_bytes(path: str, digest: Digest) -> io.RawIOBase:
    """Opens a file as a raw stream of its text; `.gz` and `.zst` are decompressed.

    Raises:
        DamagedFileError: a compressed file of 0 bytes. What is read later may raise one of `DECOMPRESSION_ERRORS`.
    """
    file = Passing(storage.open_raw(path), digest)
    if not path.endswith((".gz", ".zst")):
        return file
    if storage.stat(path).bytes == 0:
        file.close()
        raise DamagedFileError("0 bytes: not even a header")
    if path.endswith(".zst"):
        return _Zstd(file)
    return _Gzip(io.BufferedReader(file, _CHUNK_BYTES))


class _Gzip(io.RawIOBase):
    """A gzip file as a raw stream, by ISA-L: about twice as fast as zlib."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._plain = igzip.IGzipFile(fileobj=file, mode="rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return int(self._plain.readinto(buffer))

    def close(self) -> None:
        self._plain.close()
        self._file.close()
        super().close()
