"""Token files: the memory-mapped format (Megatron's indexed dataset) that data_prep writes and pipeline reads.

A token file is a pair in Megatron's layout (megatron/core/datasets/indexed_dataset.py), all little-endian:

    PREFIX.bin   token ids back to back, uint16 or int32
    PREFIX.idx   9 bytes magic, uint64 version, uint8 dtype code, uint64 S, uint64 D,
                 int32[S] sequence lengths in tokens, int64[S] byte offsets into the .bin,
                 int64[D] the sequence at which each document starts, ending with S (D = documents + 1),
                 and, in some files that Megatron wrote, int8[S] modes, which are ignored

A tokens directory holds them as `SPLIT/shard-00000`, `SPLIT/shard-00001`, ... Opening a file takes constant time,
whatever its size.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from data_prep.formats.memory_map import map_file
from data_prep.formats.sorted_search import I64, first_not_below
from foundation.directory import read_manifest
from foundation.errors import DataError

Array = npt.NDArray[Any]

SPLITS = ("train", "heldout")

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_CODES = {np.dtype(kind): code for code, kind in _DTYPES.items()}
_UINT16_BELOW = 65_500  # Megatron's threshold; readers use the dtype code: any threshold up to 65,536 is readable
_WRITE_BYTES = 4 << 20
_FLUSH_BYTES = 16 << 20
MAX_DOCUMENT_TOKENS = int(np.iinfo(np.int32).max)


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The dtype of token ids, by Megatron's rule: uint16 if the vocabulary has less than 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < _UINT16_BELOW else np.dtype("<i4")


def shard_name(i: int) -> str:
    """Name of shard `i` of a split."""
    return f"shard-{i:05d}"


def shard_prefix(tokens_dir: Path, split: str, i: int) -> Path:
    """Path of shard `i` of a split, without `.bin` or `.idx`."""
    return tokens_dir / split / shard_name(i)


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Appends `.bin` or `.idx` to `prefix`; unlike `Path.with_suffix`, it keeps dots in the name."""
    return prefix.with_name(prefix.name + suffix)


def open_split(tokens_dir: str | Path, *, split: str) -> tuple[list[Path], dict[str, Any]]:
    """Reads the shards of a split from the manifest.

    Returns:
        the shards' path prefixes in order, and the split's counts as in the manifest's `details`: {"documents",
        "tokens", "bytes", "shards": [...]}.

    Raises:
        DataError: the path is not a tokens directory, or it has no such split.
    """
    manifest = read_manifest(tokens_dir, kind="tokens")
    splits = manifest.details.get("splits", {})
    if split not in splits:
        raise DataError(f"{tokens_dir} has no split '{split}'\n  try: one of {', '.join(sorted(splits)) or 'none'}")
    return [Path(tokens_dir) / split / shard["name"] for shard in splits[split]["shards"]], splits[split]


@dataclass(frozen=True)
class TokenFile:
    """An open token file, memory-mapped read-only; data is read from disk on access.

    Attributes:
        prefix: path without `.bin` or `.idx`.
        tokens: [all tokens], of `dtype`.
        sequence_lengths: int32[S], tokens in each sequence.
        byte_offsets: int64[S], first byte of each sequence in the .bin.
        document_index: int64[D], first sequence of each document, ending with S.
    """

    prefix: Path
    tokens: Array
    sequence_lengths: Array
    byte_offsets: Array
    document_index: Array

    @classmethod
    def open(cls, prefix: str | Path, *, random_access: bool = False) -> TokenFile:
        """Memory-maps PREFIX.bin and PREFIX.idx.

        Args:
            prefix: path of the pair, without suffix.
            random_access: whether to disable read-ahead, for small reads at random offsets.

        Raises:
            DataError: a file is missing, is not a token file, has an unknown version or dtype, its size contradicts its
                counts, or the two files do not belong together.
        """
        data = with_suffix(Path(prefix), ".bin")
        found = cls.open_index(prefix, random_access=random_access)
        tokens = _map(data, random_access=random_access)
        _check_data(data, tokens.size, found.tokens.size * found.dtype.itemsize, found.dtype)
        return replace(found, tokens=tokens.view(found.dtype))

    @classmethod
    def open_index(cls, prefix: str | Path, *, random_access: bool = False) -> TokenFile:
        """Opens only the index, while the .bin is elsewhere: all tokens are 0 and take no memory."""
        prefix = Path(prefix)
        index = with_suffix(prefix, ".idx")
        raw = _map(index, random_access=random_access)
        dtype, sequences, entries = _parse_header(raw, index)
        lengths, offsets, documents = _split_index(raw, index, sequences, entries)
        if documents[-1] != sequences:
            raise DataError(
                f"{index}: the documents end at sequence {documents[-1]}, but there are {sequences} sequences"
            )
        size, rest = divmod(_expected_bytes(lengths, offsets, dtype), dtype.itemsize)
        if rest:
            raise DataError(f"{index}: its sequences end within a token of {dtype.itemsize} bytes: damaged")
        return cls(prefix, np.broadcast_to(np.zeros(1, dtype), (size,)), lengths, offsets, documents)

    @property
    def path(self) -> Path:
        """The .bin file."""
        return with_suffix(self.prefix, ".bin")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the token ids."""
        return self.tokens.dtype

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    def document_starts(self, documents: npt.ArrayLike) -> I64:
        """Implements `IndexedTokens.document_starts`."""
        sequence = np.asarray(self.document_index[np.asarray(documents)], dtype=np.int64)
        starts = np.full(sequence.shape, self.tokens.size, dtype=np.int64)
        inside = sequence < len(self.byte_offsets)
        starts[inside] = self.byte_offsets[sequence[inside]] // self.dtype.itemsize
        return starts

    def first_document_from(self, positions: I64) -> I64:
        """Implements `IndexedTokens.first_document_from`."""
        sequences = first_not_below(self.byte_offsets, positions * self.dtype.itemsize)
        index = self.document_index
        # data_prep writes one sequence per document: this saves half of the search
        if sequences.max(initial=0) < index.size:
            behind = index[np.maximum(sequences - 1, 0)] >= sequences  # the document before it
            if not np.any((index[sequences] < sequences) | (behind & (sequences > 0))):
                return sequences
        return first_not_below(index[:-1], sequences)

    def close(self) -> None:
        """Releases the memory maps. Existing slices stay valid; freeing the last slice removes the maps."""
        for field in ("tokens", "sequence_lengths", "byte_offsets", "document_index"):
            object.__setattr__(self, field, np.empty(0, getattr(self, field).dtype))


class TokenFileWriter:
    """Writes one token file, one document at a time, each as one sequence.

    `close` writes the index: a file that was not closed cannot be opened. SHA-256 sums are computed while writing.
    Memory: 4 bytes per document, 20 while closing; at most `_FLUSH_BYTES` of page cache, whatever the file's size.
    """

    def __init__(self, prefix: str | Path, *, dtype: npt.DTypeLike) -> None:
        """Creates PREFIX.bin; an existing file is replaced."""
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype).newbyteorder("<")
        self.tokens = 0
        self._code = _CODES[self.dtype]
        self._lengths: list[Array] = []
        self._starts: list[Array] = []
        self._sequences = 0
        self._digest = hashlib.sha256()
        self._written, self._flushed = 0, 0
        self._file: BinaryIO = with_suffix(self.prefix, ".bin").open("wb")

    def append(self, tokens: Array, lengths: npt.ArrayLike | None = None) -> None:
        """Appends documents.

        Args:
            tokens: [sum of lengths], ids of one or more documents, concatenated; cast to the file's dtype.
            lengths: tokens of each document; None for a single document.
        """
        sizes = np.asarray([len(tokens)] if lengths is None else lengths, dtype=np.int64)
        assert sizes.sum() == len(tokens)
        self._write(np.ascontiguousarray(tokens, dtype=self.dtype).data.cast("B"))
        self._add_documents(sizes, np.arange(len(sizes), dtype=np.int64))

    def append_pieces(self, pieces: Sequence[memoryview], lengths: Array) -> None:
        """Appends documents from separate buffers.

        Args:
            pieces: bytes of each document's ids, in the file's dtype.
            lengths: tokens of each document.
        """
        start, buffered = 0, 0
        for i, piece in enumerate(pieces):
            buffered += len(piece)
            if buffered >= _WRITE_BYTES or i == len(pieces) - 1:
                self._write(memoryview(b"".join(pieces[start : i + 1])))
                start, buffered = i + 1, 0
        self._add_documents(lengths.astype(np.int64), np.arange(len(lengths), dtype=np.int64))

    def close(self) -> dict[str, str]:
        """Writes the index and flushes both files to disk.

        Returns:
            the SHA-256 of each file, by suffix (`.bin`, `.idx`).
        """
        _sync_and_close(self._file)
        lengths = _joined(self._lengths, np.dtype("<i4"))
        offsets = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], out=offsets[1:])
        offsets *= self.dtype.itemsize
        documents = np.append(_joined(self._starts, np.dtype("<i8")), self._sequences).astype("<i8")
        header = _HEADER.pack(_MAGIC, 1, self._code, len(lengths), len(documents))
        digest = hashlib.sha256()
        with with_suffix(self.prefix, ".idx").open("wb") as file:
            for part in (memoryview(header), lengths.data.cast("B"), offsets.data.cast("B"), documents.data.cast("B")):
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
        return {".bin": self._digest.hexdigest(), ".idx": digest.hexdigest()}

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None and not self._file.closed:
            self.close()
        self._file.close()

    def _write(self, data: memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._written += len(data)
        if self._written - self._flushed >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Writes buffered data to disk and drops it from the page cache: its pages can be reused.

        Otherwise a job that writes more than fits into memory evicts everything else. On a virtual machine whose host
        reclaims free memory, each new page would cost more than the disk write.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):  # not on macOS
            offset, size = self._flushed, self._written - self._flushed
            with suppress(OSError):  # only a hint
                os.posix_fadvise(self._file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)
        self._flushed = self._written

    def _add_documents(self, lengths: Array, starts: Array) -> None:
        if len(lengths) and lengths.max() > MAX_DOCUMENT_TOKENS:
            raise too_long(int(lengths.max()))
        self._lengths.append(lengths.astype("<i4"))
        self._starts.append(starts + self._sequences)
        self._sequences += len(lengths)
        self.tokens += int(lengths.sum())


def too_long(tokens: int) -> DataError:
    """The error for a document with more tokens than `MAX_DOCUMENT_TOKENS`."""
    why = f"a document has {tokens} tokens: the format allows at most {MAX_DOCUMENT_TOKENS}"
    return DataError(f"{why}\n  try: split the document")


def _map(path: Path, *, random_access: bool) -> Array:
    try:
        return map_file(path, random_access=random_access)
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing\n  try: write the token file again; it is a pair of .bin and .idx"
        ) from None


def dtype_in_header(header: bytes, path: str) -> np.dtype[Any]:
    """The dtype of the ids, read from the first `HEADER_BYTES` of an index.

    Raises:
        DataError: the header does not belong to the index of a token file.
    """
    return _parse_header(np.frombuffer(header, np.uint8), Path(path))[0]


def _parse_header(mapped: Array, path: Path) -> tuple[np.dtype[Any], int, int]:
    raw = bytes(mapped[: _HEADER.size])
    if raw[: len(_MAGIC)] != _MAGIC:
        raise DataError(f"{path} starts with {raw[:9]!r}, not {_MAGIC!r}: it is not the index of a token file")
    if len(raw) < _HEADER.size:
        raise DataError(f"{path} has {len(raw)} bytes, but a header has {_HEADER.size}: truncated")
    _, version, code, sequences, entries = _HEADER.unpack(raw)
    if version != 1 or code not in _DTYPES or entries < 1:
        known = ", ".join(map(str, _DTYPES))
        found = f"version {version}, dtype code {code}, {entries} document entries"
        raise DataError(f"{path}: {found}; supported are version 1, dtype codes {known}, at least 1 entry")
    return np.dtype(_DTYPES[code]).newbyteorder("<"), sequences, entries


def _split_index(raw: Array, path: Path, sequences: int, entries: int) -> tuple[Array, Array, Array]:
    expected = _HEADER.size + 12 * sequences + 8 * entries
    if raw.size not in (expected, expected + sequences):
        raise DataError(
            f"{path} has {raw.size} bytes, but {sequences} sequences and {entries - 1} documents need {expected}: "
            "truncated or damaged\n  try: write the token file again"
        )
    offsets_at, documents_at = _HEADER.size + 4 * sequences, _HEADER.size + 12 * sequences
    lengths, offsets = raw[_HEADER.size : offsets_at], raw[offsets_at:documents_at]
    return lengths.view("<i4"), offsets.view("<i8"), raw[documents_at:expected].view("<i8")


def _expected_bytes(lengths: Array, offsets: Array, dtype: np.dtype[Any]) -> int:
    return int(offsets[-1]) + int(lengths[-1]) * dtype.itemsize if len(lengths) else 0


def _check_data(path: Path, found: int, expected: int, dtype: np.dtype[Any]) -> None:
    if found != expected:
        state = "truncated" if found < expected else "longer than expected"
        raise DataError(
            f"{path} has {found} bytes, but its index implies {expected} ({expected // dtype.itemsize} tokens of "
            f"{dtype.itemsize} bytes): {state}\n  try: write the token file again"
        )


def _joined(parts: list[Array], dtype: np.dtype[Any]) -> Array:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _sync_and_close(file: BinaryIO) -> None:
    if not file.closed:
        file.flush()
        os.fsync(file.fileno())
        file.close()
