"""Loss masks: `PREFIX.mask` beside `PREFIX.bin`, one byte for each token, 1 where it is learnt and 0 where it is not.

Only tokens directories with conversations have them. Other readers of Megatron's files do not look at them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy.typing as npt

from data_prep.formats.memory_map import map_file
from headrace.base.errors import DataError

MASK = ".mask"
_PIECE_BYTES = 4 << 20


class MaskWriter:
    """Writes a mask, document by document. SHA-256 is taken on the way."""

    def __init__(self, prefix: Path) -> None:
        """Creates PREFIX.mask, replacing one that is there."""
        self._digest = hashlib.sha256()
        self._file: BinaryIO = mask_path(prefix).open("wb")

    def append(self, pieces: Sequence[memoryview]) -> None:
        """Appends documents whose masks lie apart from one another."""
        start, held = 0, 0
        for i, piece in enumerate(pieces):
            held += len(piece)
            if held >= _PIECE_BYTES or i == len(pieces) - 1:
                data = b"".join(pieces[start : i + 1])
                self._file.write(data)
                self._digest.update(data)
                start, held = i + 1, 0

    def close(self) -> dict[str, str]:
        """Flushes the file to disk; returns its SHA-256 by suffix."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return {MASK: self._digest.hexdigest()}

    def __enter__(self) -> MaskWriter:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()


def open_mask(prefix: Path, *, tokens: int, at_random: bool = False) -> npt.NDArray[Any] | None:
    """The mask of a token file, memory-mapped: uint8 [tokens]; None where it has none.

    Args:
        prefix: of the token file.
        tokens: how many it holds.
        at_random: see `map_file`.

    Raises:
        DataError: it is not as long as the token file.
    """
    path = mask_path(prefix)
    try:
        mask = map_file(path, at_random=at_random)
    except FileNotFoundError:
        return None
    if mask.size != tokens:
        raise DataError(f"{path} has {mask.size} bytes for {tokens} tokens\n  try: make the tokens again")
    return mask


def mask_path(prefix: Path) -> Path:
    """PREFIX.mask."""
    return prefix.with_name(prefix.name + MASK)
