"""Pack files (sequence packing): which document pieces make up each training sample of a shard.

`SHARD.bins`, beside the shard's name in `TOKENS/packed-LENGTH/SPLIT`, all little-endian:

    8 bytes magic, uint64 version, uint64 T, uint64 B, uint64 P,
    int64[B + 1] the first piece of each bin, ending with P,
    int64[P] the first token of each piece within the shard's .bin, int32[P] its length in tokens

A bin is a sample of T inputs and T targets: at most T + 1 tokens, the rest padding at the end. A document that fits is
one piece. A longer document is dropped, truncated to one piece, or cut into pieces of T + 1 tokens that overlap by one
token: the last target of a piece is the first input of the next. So every token of a document that is not shortened is
a target exactly once, except its first token.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.formats.memory_map import map_file
from foundation.errors import DataError

I64 = npt.NDArray[np.int64]

PACKING_KIND, PACK_SUFFIX = "packing", ".bins"
_MAGIC = b"HRBINS\x00\x00"
_HEADER = struct.Struct("<8sQQQQ")


def packing_name(length: int) -> str:
    """Name of the subdirectory of a tokens directory that holds its packing into samples of `length` tokens."""
    return f"packed-{length}"


@dataclass(frozen=True)
class PackFile:
    """An open pack file, memory-mapped.

    Attributes:
        length: T, tokens per sample.
        first_piece: int64 [B + 1], index of each bin's first piece, ending with P.
        starts: int64 [P], first token of each piece within the shard's .bin.
        lengths: int32 [P], tokens in each piece.
    """

    length: int
    first_piece: I64
    starts: I64
    lengths: npt.NDArray[np.int32]

    @classmethod
    def open(cls, path: Path) -> PackFile:
        """Memory-maps a pack file.

        Raises:
            DataError: the file is missing, is not a pack file, has an unknown version, or its size contradicts its
                header.
        """
        try:
            raw = map_file(path)
        except FileNotFoundError:
            raise DataError(f"{path} is missing\n  try: pack the tokens again") from None
        if raw.size < _HEADER.size or bytes(raw[: len(_MAGIC)]) != _MAGIC:
            raise DataError(f"{path} is not a pack file\n  try: pack the tokens again")
        _, version, length, bins, pieces = _HEADER.unpack(bytes(raw[: _HEADER.size]))
        starts_at = _HEADER.size + 8 * (bins + 1)
        lengths_at = starts_at + 8 * pieces
        if version != 1 or raw.size != lengths_at + 4 * pieces:
            found = f"version {version}, {bins} bins, {pieces} pieces, {raw.size} bytes"
            raise DataError(f"{path}: {found}: damaged, or of an unknown version\n  try: pack the tokens again")
        first, starts = raw[_HEADER.size : starts_at].view("<i8"), raw[starts_at:lengths_at].view("<i8")
        return cls(length, first, starts, raw[lengths_at:].view("<i4"))

    @property
    def bins(self) -> int:
        """Number of samples."""
        return self.first_piece.size - 1


def write_pack(path: Path, *, length: int, first_piece: I64, starts: I64, lengths: I64) -> str:
    """Writes a pack file from the arrays of a `PackFile`. Returns the file's SHA-256, in hexadecimal."""
    header = _HEADER.pack(_MAGIC, 1, length, first_piece.size - 1, starts.size)
    arrays, digest = ((first_piece, "<i8"), (starts, "<i8"), (lengths, "<i4")), hashlib.sha256()
    with path.open("wb") as file:
        for part in (header, *(array.astype(kind).tobytes() for array, kind in arrays)):
            file.write(part)
            digest.update(part)
    return digest.hexdigest()


def cut_documents(bounds: I64, *, length: int, tokens: I64 | None = None) -> tuple[I64, I64]:
    """Cuts documents into pieces of at most T + 1 tokens. Documents of less than two tokens have no target: no piece.

    Args:
        bounds: int64 [documents + 1], document starts (`TokenFile.document_starts`), ending with the file's end.
        length: T, tokens per sample.
        tokens: int64 [documents], number of leading tokens of each document to keep; default: all.

    Returns:
        starts, lengths: int64 [pieces] each, in document order.
    """
    tokens = np.diff(bounds) if tokens is None else tokens
    pieces = np.maximum(0, -(-(tokens - 1) // length))
    document = np.repeat(np.arange(tokens.size), pieces)
    number = np.arange(document.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return bounds[document] + number * length, np.minimum(length + 1, tokens[document] - number * length)
