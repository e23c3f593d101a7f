"""Text file reader: one file is one document."""

from __future__ import annotations

import io
from collections.abc import Iterator

from data_prep.sources.bytesource import DECOMPRESSION_ERRORS, DamagedFileError, Digest, open_bytes
from data_prep.sources.magic import described
from data_prep.sources.records import NOT_TEXT, TOO_LONG, BadRecord, TextBatch, too_long

_PIECE_BYTES = 128 << 10


def read(
    path: str, *, source: str, file: str, digest: Digest, max_bytes: int | None = None
) -> Iterator[TextBatch | BadRecord]:
    """Yields the document of a UTF-8 file, without a byte-order mark; line ends stay unchanged.

    A binary file, recognized by a NUL byte or by its beginning, is a `BadRecord`.

    Args:
        max_bytes: largest decompressed size; a longer file is a `BadRecord` and read no further. None: no limit.

    Raises:
        DamagedFileError: a compressed file is truncated or damaged.
    """
    try:
        with open_bytes(path, digest) as stream:
            raw = _read(stream, max_bytes)
    except DECOMPRESSION_ERRORS as error:
        raise DamagedFileError(str(error)) from None
    if raw is None:
        detail = too_long(f"the file has more than {max_bytes:,} bytes", limit=max_bytes or 0)
        yield BadRecord(source, file, "file", None, TOO_LONG, detail)
        return
    if (what := described(raw, path) or ("binary, it has NUL bytes: exclude it" if b"\0" in raw else None)) is not None:
        yield BadRecord(source, file, "file", None, NOT_TEXT, what)
        return
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        yield BadRecord(
            source, file, "line", line, "not UTF-8", f"byte {raw[error.start]:#04x} at offset {error.start}"
        )
        return
    batch = TextBatch()
    batch.add(text, 0)
    yield batch


def _read(stream: io.RawIOBase, max_bytes: int | None) -> bytes | None:
    """Reads all bytes of a stream; None if there are more than `max_bytes`, after at most one more piece."""
    pieces: list[bytes] = []
    left = float("inf") if max_bytes is None else max_bytes
    while piece := stream.read(_PIECE_BYTES):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            return None
    return b"".join(pieces)
