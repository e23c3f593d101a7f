"""Training texts, read and cleaned once: hashed first, then trained on if no stored tokenizer was trained on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

_MEMORY_BYTES = 128 << 20
"""Largest size kept in memory; more goes to a file. Twice the default sample, which sentencepiece copies, too."""
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class SpooledTexts:
    """Texts, in order; iterable any number of times, one after the other.

    Attributes:
        file: file with each text as its length in bytes (8 bytes, little-endian) and its UTF-8.
        sha256: SHA-256 of the file, in hexadecimal.
        text_bytes: UTF-8 bytes of all texts.
    """

    file: IO[bytes]
    sha256: str
    text_bytes: int

    def __iter__(self) -> Iterator[str]:
        self.file.seek(0)
        while length := self.file.read(_LENGTH_BYTES):
            yield self.file.read(int.from_bytes(length, "little")).decode()


@contextmanager
def spool(texts: Iterable[str], directory: Path) -> Iterator[SpooledTexts]:
    """Reads all texts; they are kept until the block ends.

    Args:
        directory: directory of the unnamed file of a large sample.

    Raises:
        OSError: the disk is full.
    """
    digest, total = hashlib.sha256(), 0
    with SpooledTemporaryFile(_MEMORY_BYTES, dir=str(directory)) as file:
        for text in texts:
            raw = text.encode()
            framed = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw
            digest.update(framed)
            file.write(framed)
            total += len(raw)
        yield SpooledTexts(file, digest.hexdigest(), total)
