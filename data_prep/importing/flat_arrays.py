"""Flat arrays of ids: OLMo's .npy, llm.c's and nanoGPT's .bin, and .npy files of numpy.

Sources of the layouts: dolma's python/dolma/tokenizer/memmap_writer.py (no header; NAME.csv.gz with start, end, id,
src, loc of each document), llm.c's dev/data/data_common.py (256 int32: magic, version, number of tokens) and fineweb.py
(end-of-text before each document), nanoGPT's data/openwebtext/prepare.py (uint16, end-of-text after each document).
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.formats.memory_map import map_file
from data_prep.importing.documents import BLOCK_TOKENS, Array, Documents, by_blocks
from foundation.errors import ConfigError, DataError

_LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Magic number of llm.c -> (version, dtype)."""
_LLMC_EVALUATION = 20240522
_HEADER_INTS = 256
_NUMPY_MAGIC = b"\x93NUMPY"
DTYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
_LOOKED_AT = 1 << 16


@dataclass(frozen=True)
class FlatFile:
    """A file of ids.

    Attributes:
        path: path of the file.
        dtype: dtype of its ids, with the byte order.
        offset: bytes before the first id.
        ends: path of the file with the documents' ends, or None.
        eos_first: whether the tool puts end-of-text before each document.
        kind: tool that wrote it, for messages.
    """

    path: Path
    dtype: str
    offset: int = 0
    ends: Path | None = None
    eos_first: bool = False
    kind: str = "nanoGPT"

    @property
    def masked(self) -> bool:
        """Implements `TokenSource`."""
        return False

    @property
    def tokens(self) -> Array:
        """All ids, memory-mapped."""
        return map_file(self.path)[self.offset :].view(self.dtype)

    def read(self) -> Iterator[Documents]:
        """Implements `TokenSource`; without a file of ends, yields one document."""
        tokens = self.tokens
        if self.ends is not None:
            yield from by_blocks(tokens, _read_ends(self.ends, tokens.size))
            return
        for start in range(0, tokens.size, BLOCK_TOKENS):
            block = tokens[start : start + BLOCK_TOKENS]
            yield Documents(block, np.array([block.size]))


def open_flat(path: Path, *, dtype: str | None, vocab_size: int) -> FlatFile:
    """Checks the header and size of a file and finds the dtype of its ids.

    Args:
        path: a .npy, .bin or .ds file.
        dtype: a name of `DTYPES`, for files that do not record their dtype; None for the smallest that holds the
            vocabulary, as in OLMo-core's `NumpyDatasetConfig`.
        vocab_size: number of ids of the tokenizer.

    Raises:
        DataError: the file is truncated, has an unknown magic or version, or contradicts its metadata.
        ConfigError: `dtype` contradicts the file.
    """
    with path.open("rb") as file:
        head = file.read(4 * _HEADER_INTS)
    if head.startswith(_NUMPY_MAGIC):
        found = _numpy(path)
    elif path.suffix == ".bin" and len(head) == 4 * _HEADER_INTS and _is_llmc(path, head):
        found = _llmc(path, head)
    else:
        ends = path.with_suffix(".csv.gz")
        taken = DTYPES[dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")]
        kind = {".npy": "OLMo", ".ds": "datatrove without an index"}.get(path.suffix, "nanoGPT")
        found = FlatFile(path, taken, ends=ends if ends.is_file() else None, kind=kind)
        _check_width(found)
    if dtype is not None and np.dtype(found.dtype).itemsize != np.dtype(DTYPES[dtype]).itemsize:
        why = f"{path} says that its ids are {np.dtype(found.dtype).name}"
        raise ConfigError("--dtype", dtype, why=why, remedy="leave it out")
    return found


def _is_llmc(path: Path, head: bytes) -> bool:
    """Whether a header is llm.c's: its magic, or a block of zeros without text after three numbers.

    Raises:
        DataError: the header is from a version of llm.c that is not supported.
    """
    numbers = np.frombuffer(head, "<i4")
    magic = int(numbers[0])
    if magic in _LLMC:
        return True
    swapped = int(np.frombuffer(head, ">i4")[0])
    if magic == _LLMC_EVALUATION:
        why, remedy = "is an evaluation file of llm.c (multiple choice), not tokens", "leave it out of the folder"
    elif swapped in _LLMC:
        why, remedy = "is a file of llm.c in big-endian byte order", "write it on a little-endian machine"
    elif 20240000 <= magic < 20300000 and not numbers[3:].any():
        known = ", ".join(map(str, _LLMC))
        why, remedy = f"has a header like llm.c's with the magic {magic}; known are {known}", "write it with llm.c"
    else:
        return False
    raise DataError(f"{path} {why}\n  try: {remedy}")


def _llmc(path: Path, head: bytes) -> FlatFile:
    magic, version, tokens = np.frombuffer(head, "<i4")[:3].tolist()
    known, dtype = _LLMC[magic]
    if version != known:
        raise DataError(f"{path} has version {version} of magic {magic}; known is {known}\n  try: write it with llm.c")
    size, expected = path.stat().st_size, 4 * _HEADER_INTS + tokens * np.dtype(dtype).itemsize
    if size != expected:
        state = "truncated" if size < expected else "longer than it says"
        raise DataError(f"{path} has {size} bytes, and its header says {tokens} tokens ({expected} bytes): {state}")
    return FlatFile(path, dtype, offset=4 * _HEADER_INTS, eos_first=True, kind="llm.c")


def _numpy(path: Path) -> FlatFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}\n  try: write it again") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        why = f"{path} is an array of {array.dtype} with shape {array.shape}, and ids are integers in one dimension"
        raise DataError(f"{why}\n  try: np.save(path, ids.ravel())")
    return FlatFile(path, array.dtype.str, offset=array.offset, eos_first=True, kind="numpy")


def _check_width(file: FlatFile) -> None:
    """Checks a dtype that the file does not record against the file's contents.

    Raises:
        DataError: the file does not hold a whole number of ids, or its documents end elsewhere.
        ConfigError: four-byte ids would each be read as two.
    """
    size, width = file.path.stat().st_size, np.dtype(file.dtype).itemsize
    if size % width:
        raise DataError(f"{file.path} has {size} bytes, no whole number of ids of {width} bytes: truncated")
    ids = map_file(file.path)[: 2 * _LOOKED_AT].view("<u2")
    if width == 2 and ids.size >= 8 and not ids[1::2].any() and ids[::2].any():
        why = f"every second uint16 of {file.path} is zero: its ids are uint32"
        raise ConfigError("--dtype", "uint16", why=why, remedy="--dtype uint32")


def _read_ends(path: Path, tokens: int) -> Array:
    """Reads the documents' ends from the metadata of OLMo's tools, int64 [documents]."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = [(int(row[0]), int(row[1])) for row in csv.reader(file)]
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{path} is damaged: {error}\n  try: copy it again, or --borders eos") from None
    bounds = np.array(rows, dtype=np.int64).reshape(-1, 2)
    begins = np.concatenate([[0], bounds[:-1, 1]])
    if not len(bounds) or bounds[-1, 1] != tokens or np.any(bounds[:, 0] != begins):
        last = bounds[-1, 1] if len(bounds) else 0
        why = f"{path} has documents up to token {last}, and its .npy has {tokens} tokens"
        raise DataError(
            f"{why}: the dtype is another, or the two files do not belong together\n  try: --dtype, or --borders eos"
        )
    return bounds[:, 1]
