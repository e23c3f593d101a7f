"""Text file reader: one file is one document."""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.sources.bytesource import DECOMPRESSION_ERRORS, DamagedFileError, Digest, open_bytes
from data_prep.sources.records import BadRecord, TextBatch


def read(path: str, *, source: str, file: str, digest: Digest) -> Iterator[TextBatch | BadRecord]:
    """Yields the document of a UTF-8 file, without a byte-order mark; line ends are not changed.

    Raises:
        DamagedFileError: a compressed file is truncated or damaged.
    """
    try:
        with open_bytes(path, digest) as stream:
            raw = stream.readall()
    except DECOMPRESSION_ERRORS as error:
        raise DamagedFileError(str(error)) from None
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
