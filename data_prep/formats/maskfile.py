"""Loss mask files: `PREFIX.mask` beside `PREFIX.bin`, one byte per token, 1 if it counts in the loss, else 0.

Only tokens directories with conversations have them. Other readers of Megatron's format ignore them. datatrove's
`NAME.ds.loss` has the same content.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy.typing as npt

from data_prep.formats.dsfile import DS, LOSS
from data_prep.formats.memory_map import map_file
from foundation.errors import DataError

MASK = ".mask"
_WRITE_BYTES = 4 << 20


class MaskWriter:
    """Writes a loss mask file, document by document, and computes its SHA-256 while writing."""

    def __init__(self, prefix: Path) -> None:
        """Creates PREFIX.mask; an existing file is replaced."""
        self._digest = hashlib.sha256()
        self._file: BinaryIO = mask_path(prefix).open("wb")

    def append(self, pieces: Sequence[memoryview]) -> None:
        """Appends documents, given as the bytes of each document's mask."""
        start, buffered = 0, 0
        for i, piece in enumerate(pieces):
            buffered += len(piece)
            if buffered >= _WRITE_BYTES or i == len(pieces) - 1:
                data = b"".join(pieces[start : i + 1])
                self._file.write(data)
                self._digest.update(data)
                start, buffered = i + 1, 0

    def close(self) -> dict[str, str]:
        """Flushes the file to disk and closes it; returns {suffix: SHA-256}."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return {MASK: self._digest.hexdigest()}

    def __enter__(self) -> MaskWriter:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()


def open_mask(prefix: Path, *, tokens: int, random_access: bool = False) -> npt.NDArray[Any] | None:
    """Memory-maps the loss mask of a token file.

    Args:
        prefix: path prefix of the token file.
        tokens: number of tokens in it.
        random_access: whether to disable read-ahead, for small reads at random offsets.

    Returns:
        uint8 [tokens], or None if the token file has no mask.

    Raises:
        DataError: the mask does not have one byte per token.
    """
    path = mask_path(prefix)
    try:
        mask = map_file(path, random_access=random_access)
    except FileNotFoundError:
        return None
    if mask.size != tokens:
        raise DataError(
            f"{path} has {mask.size} bytes for {tokens} tokens: a loss mask has one byte per token\n"
            "  try: make the tokens again"
        )
    return mask


def mask_path(prefix: Path) -> Path:
    """Path of the loss mask file of a token file: PREFIX.mask, or NAME.ds.loss."""
    return prefix.with_name(prefix.name + (LOSS if prefix.name.endswith(DS) else MASK))
