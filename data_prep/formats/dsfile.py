"""datatrove's token files, which nanotron also reads: `NAME.ds` with `NAME.ds.index`, all little-endian.

The layout is `TokenizedFile`'s in datatrove/pipeline/tokens/tokenizer.py (0.10.1):

    NAME.ds            token ids back to back, uint16 or uint32
    NAME.ds.index      uint64[D], the end of each document in tokens
    NAME.ds.loss       one byte per token, 1 if it counts in the loss; only with save_loss_metadata
    NAME.ds.metadata   text: TOKENIZER|BYTES_PER_ID, the number of tokens, and the same for people; may be missing
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.formats.memory_map import map_file
from data_prep.formats.sorted_search import I64, first_not_below
from foundation.errors import DataError

DS, LOSS = ".ds", ".loss"
INDEX = ".index"
_METADATA = ".metadata"
_UNKNOWN = "Unknown Tokenizer"
_AGAIN = "write it again with datatrove"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DsFile:
    """An open .ds file, memory-mapped read-only; data is read from disk on access.

    Attributes:
        path: path of the .ds file.
        tokens: [all tokens], uint16 or int32: four-byte ids are below 2^31.
        ends: int64 [documents], position at which each document ends.
    """

    path: Path
    tokens: Array
    ends: Array

    @classmethod
    def open(cls, path: str | Path, *, random_access: bool = False) -> DsFile:
        """Memory-maps NAME.ds and NAME.ds.index. The sizes of the two give the bytes per id.

        Args:
            path: path of the .ds file.
            random_access: whether to disable read-ahead, for small reads at random offsets.

        Raises:
            DataError: the index is missing or truncated, does not fit the tokens, or the metadata contradicts them.
        """
        path = Path(path)
        index = Path(f"{path}{INDEX}")
        try:
            raw = map_file(index, random_access=random_access)
            tokens = map_file(path, random_access=random_access)
        except FileNotFoundError as error:
            why = "the .ds file is not finished, or was written with save_index=False"
            raise DataError(f"{error.filename} is missing: {why}\n  try: {_AGAIN}, or {_import(path)}") from None
        if raw.size % 8:
            raise DataError(f"{index} has {raw.size} bytes, no whole number of uint64: truncated\n  try: {_AGAIN}")
        ends = raw.view("<i8")
        return cls(path, tokens.view(_dtype(path, tokens.size, ends)), ends)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the token ids."""
        return self.tokens.dtype

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.ends)

    def document_starts(self, documents: npt.ArrayLike) -> I64:
        """Implements `IndexedTokens.document_starts`."""
        number = np.asarray(documents, dtype=np.int64)
        starts = np.zeros(number.shape, dtype=np.int64)
        starts[number > 0] = self.ends[number[number > 0] - 1]
        return starts

    def first_document_from(self, positions: I64) -> I64:
        """Implements `IndexedTokens.first_document_from`."""
        after = np.minimum(first_not_below(self.ends, positions) + 1, self.documents)
        return np.where(positions > 0, after, 0)


def tokenizer_name(path: Path) -> str | None:
    """The tokenizer that the metadata of a .ds file names, a name at Hugging Face or a path; None without a name."""
    named = _metadata(path)[0]
    return None if named in ("", _UNKNOWN) else named


def _import(path: Path) -> str:
    return f"headrace import {path} OUT --tokenizer FOLDER, by the end-of-text id"


def _dtype(path: Path, size: int, ends: Array) -> np.dtype[Any]:
    last = int(ends[-1]) if len(ends) else 0
    width = size // last if last else 2
    if width not in (2, 4) or size != last * width:
        raise DataError(
            f"{path} has {size} bytes, and its index ends at {last} tokens of two or four bytes: one of them is"
            f" truncated, or they do not belong together\n  try: {_AGAIN}"
        )
    said = _metadata(path)[1]
    if last and said is not None and said != width:
        raise DataError(
            f"{path}{_METADATA} says {said} bytes per id, and the tokens and their index say {width}: the files do not"
            f" belong together\n  try: {_AGAIN}"
        )
    return np.dtype("<u2") if width == 2 else np.dtype("<i4")


def _metadata(path: Path) -> tuple[str, int | None]:
    """Tokenizer and bytes per id recorded in the metadata; "" and None without a metadata file."""
    file = Path(f"{path}{_METADATA}")
    try:
        line = file.read_text(encoding="utf-8").partition("\n")[0]
    except FileNotFoundError:
        return "", None
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is damaged: {error}\n  try: remove it; it is not needed") from None
    name, _, width = line.rpartition("|")
    if not width.isdecimal():
        return line, None
    return name.partition("|")[0], int(width)
