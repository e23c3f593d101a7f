"""Chunks and shards that hold samples after a table of offsets: litdata's chunk-*.bin and MosaicML's shard.*.mds.

Sources of the layouts: `BinaryWriter._create_chunk` of litdata/streaming/writer.py and `TokensLoader` of item_loader.py
(0.2.76); `MDSWriter` of streaming/base/format/mds/writer.py and `NDArray` of encodings.py (0.13.0). In both, a file is

    uint32 N, uint32[N + 1] offsets of the samples from the beginning of the file, the samples

and for MDS, its config as JSON before the samples. A sample of litdata's TokensLoader is only ids. A sample of MDS is
uint32 sizes of the columns without fixed size, then the columns.
"""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.formats.memory_map import map_file
from data_prep.importing.columns import find_ids
from data_prep.importing.documents import BLOCK_TOKENS, Array, Documents, by_blocks
from foundation.errors import ConfigError, DataError
from foundation.foreign_folders import file_beside

INDEX = "index.json"
_TORCH_DTYPES = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
_NUMPY_DTYPES = {0: "i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "u1", 5: "<u2", 6: "<u4", 7: "<u8"}
"""Number of an integer dtype in litdata/constants.py -> dtype."""
_MDS_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
_MDS_BYTES = "<i8"
"""Default dtype of ids in a column of bytes, as in llm-foundry."""
_ARROW_CODECS = {"zstd": "zstd", "br": "brotli", "snappy": "snappy"}
_AGAIN = "copy the folder again"


@dataclass(frozen=True)
class _Compressed:
    """A file that may be compressed.

    Attributes:
        path: path of the file.
        size: bytes of its decompressed content.
        codec: zstd, gz, bz2, br or snappy, with or without a level; None for an uncompressed file.
    """

    path: Path
    size: int
    codec: str | None

    def content(self) -> Array:
        """Reads the decompressed content, uint8 [size].

        Raises:
            DataError: the content cannot be decompressed, or has another size.
        """
        codec = (self.codec or "").partition(":")[0]
        try:
            if not codec:
                raw = map_file(self.path)
            elif codec in _ARROW_CODECS:
                packed = self.path.read_bytes()
                unpacked = pa.decompress(packed, decompressed_size=self.size, codec=_ARROW_CODECS[codec])
                raw = np.frombuffer(unpacked, np.uint8)
            else:
                unpack = gzip.decompress if codec == "gz" else bz2.decompress
                raw = np.frombuffer(unpack(self.path.read_bytes()), np.uint8)
        except (OSError, EOFError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{self.path} is damaged ({codec}): {error}\n  try: {_AGAIN}") from None
        if raw.size != self.size:
            raise DataError(f"{self.path} holds {raw.size} bytes, {INDEX} says {self.size}\n  try: {_AGAIN}")
        return raw

    def offsets(self, content: Array, samples: int) -> Array:
        """Reads and checks the offsets of the samples, int64 [samples + 1].

        Raises:
            DataError: the number of samples differs, or offsets are not within the file.
        """
        table = content[: 4 * (samples + 2)].view("<u4").astype(np.int64) if content.size >= 4 * (samples + 2) else None
        if table is None or table[0] != samples or np.any(np.diff(table[1:]) < 0) or table[-1] != content.size:
            found = "no table of offsets" if table is None else f"{table[0]} samples up to byte {table[-1]}"
            why = f"{self.path} has {found}, and {INDEX} says {samples} samples in {content.size} bytes"
            raise DataError(f"{why}: they do not belong together\n  try: {_AGAIN}")
        return table[1:]


@dataclass(frozen=True)
class _Chunk:
    file: _Compressed
    samples: int

    @property
    def path(self) -> Path:
        """Implements `TokenSource`."""
        return self.file.path

    @property
    def masked(self) -> bool:
        """Implements `TokenSource`."""
        return False


@dataclass(frozen=True)
class LitdataChunk(_Chunk):
    """A chunk of litdata with a tensor of ids per sample."""

    dtype: str

    def read(self) -> Iterator[Documents]:
        """Implements `TokenSource`."""
        content = self.file.content()
        offsets = self.file.offsets(content, self.samples)
        width = np.dtype(self.dtype).itemsize
        bounds, rest = np.divmod(offsets - offsets[0], width)
        if rest.any():
            raise DataError(
                f"{self.path} has a sample whose size is no whole number of {self.dtype} ids\n  try: {_AGAIN}"
            )
        tokens = np.frombuffer(content[offsets[0] :].tobytes(), self.dtype)
        yield from by_blocks(tokens, bounds[1:])


@dataclass(frozen=True)
class MdsShard(_Chunk):
    """A shard of MosaicML streaming.

    Attributes:
        sizes: bytes of each column; None if they differ between samples.
        column: index of the column of ids.
        encoding: MDS encoding of that column: "bytes", or "ndarray" with or without ":DTYPE" and ":SHAPE".
        dtype: dtype of the ids in a column of bytes.
    """

    sizes: tuple[int | None, ...]
    column: int
    encoding: str
    dtype: str

    def read(self) -> Iterator[Documents]:
        """Implements `TokenSource`."""
        content = self.file.content()
        offsets = self.file.offsets(content, self.samples).tolist()
        rows, held = [], 0
        for start, end in pairwise(offsets):
            rows.append(self._ids(content[start:end].tobytes()))
            held += rows[-1].size
            if held >= BLOCK_TOKENS:
                yield _rows(rows)
                rows, held = [], 0
        if rows:
            yield _rows(rows)

    def _ids(self, sample: bytes) -> Array:
        try:
            open_sizes = iter(np.frombuffer(sample, "<u4", count=sum(size is None for size in self.sizes)).tolist())
            sizes = [next(open_sizes) if size is None else size for size in self.sizes]
            at = 4 * sum(size is None for size in self.sizes) + sum(sizes[: self.column])
            return self._decoded(sample[at : at + sizes[self.column]])
        except (ValueError, KeyError, IndexError) as error:
            raise DataError(
                f"{self.path} has a sample that its encoding cannot read: {error}\n  try: {_AGAIN}"
            ) from None

    def _decoded(self, datum: bytes) -> Array:
        kind, _, rest = self.encoding.partition(":")
        if kind == "bytes":
            return np.frombuffer(datum, self.dtype)
        named, _, shape = rest.partition(":")
        dtype, at = (np.dtype(named).newbyteorder("<"), 0) if named else (np.dtype(_MDS_DTYPES[datum[0]]), 1)
        if not shape:  # one byte before them has the number of axes and the bytes of each length
            at += 1 + (datum[at] >> 2) * (1 << datum[at] % 4)
        return np.frombuffer(datum, dtype, offset=at)


def _rows(rows: list[Array]) -> Documents:
    return Documents(np.concatenate(rows), np.array([row.size for row in rows], dtype=np.int64))


def read_index(folder: Path) -> dict[str, Any]:
    """Reads index.json of a folder; {} without one, or if it belongs to neither tool.

    Raises:
        DataError: index.json is damaged.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}\n  try: {_AGAIN}") from None
    return index if isinstance(index, dict) and ("chunks" in index or "shards" in index) else {}


def open_litdata(folder: Path, index: dict[str, Any]) -> list[LitdataChunk]:
    """Opens the chunks of a folder of litdata, in order.

    Raises:
        DataError: the chunks hold no ids or are encrypted, or a file is missing or has another size.
    """
    path = folder / INDEX
    try:
        config, chunks = index["config"], index["chunks"]
        name, _, number = config["data_format"][0].partition(":")
        dtypes = {"no_header_tensor": _TORCH_DTYPES, "no_header_numpy": _NUMPY_DTYPES}.get(name, {})
        dtype = dtypes.get(int(number)) if number.isdecimal() else None
        plain = len(config["data_format"]) == 1 and all(chunk["dim"] is not None for chunk in chunks)
        if dtype is None or not plain:
            why = f"{path} has samples in the format {config['data_format']}; ids are one tensor, of TokensLoader"
            raise DataError(f"{why}\n  try: optimize(..., item_loader=TokensLoader()), or its text as JSON lines")
        if config.get("encryption"):
            raise DataError(f"{path}: its chunks are encrypted\n  try: write it without encryption")
        codec = config["compression"]
        found = [
            LitdataChunk(
                _Compressed(file_beside(path, chunk["filename"]), int(chunk["chunk_bytes"]), codec),
                chunk["chunk_size"],
                dtype,
            )
            for chunk in chunks
        ]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(f"{path} is not as litdata writes it: {error!r}\n  try: {_AGAIN}") from None
    for chunk in found:
        _check_file(chunk.file, None if codec else chunk.file.size)
    return found


def open_mds(folder: Path, index: dict[str, Any], *, dtype: str | None) -> tuple[list[MdsShard], list[str]]:
    """Opens a folder of MosaicML streaming: its shards in order, and the names of columns that are not read.

    Args:
        dtype: dtype of the ids in a column of bytes, which MDS does not record; None for llm-foundry's default, int64.

    Raises:
        DataError: there is no column of ids, the format is not mds, or a file is missing or has another size.
        ConfigError: a dtype is given although the column records its own.
    """
    path, found, others = folder / INDEX, [], list[str]()
    try:
        for shard in index["shards"]:
            if shard["format"] != "mds":
                raise DataError(f"{path} has shards of format {shard['format']}\n  try: MDSWriter, or headrace prep")
            names, encodings = shard["column_names"], shard["column_encodings"]
            column = names.index(find_ids(names, path))
            others = [name for name in names if name != names[column]]
            encoding = encodings[column]
            _check_encoding(encoding, names[column], path, dtype)
            stored, raw = shard["zip_data"], shard["raw_data"]
            name = (stored or raw)["basename"]
            if stored and not file_beside(path, name).is_file() and file_beside(path, raw["basename"]).is_file():
                stored, name = None, raw["basename"]  # decompressed in streaming's cache
            file = _Compressed(file_beside(path, name), int(raw["bytes"]), shard["compression"] if stored else None)
            _check_file(file, int((stored or raw)["bytes"]))
            sizes = tuple(shard["column_sizes"])
            taken = np.dtype(dtype or _MDS_BYTES).newbyteorder("<").str
            found.append(MdsShard(file, int(shard["samples"]), sizes, column, encoding, taken))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(f"{path} is not as MDSWriter writes it: {error!r}\n  try: {_AGAIN}") from None
    return found, others


def _check_encoding(encoding: str, column: str, path: Path, dtype: str | None) -> None:
    kind, _, named = encoding.partition(":")
    if kind not in ("bytes", "ndarray") or "float" in named:
        raise DataError(
            f"{path}: column {column} has the encoding {encoding}; token ids are bytes or ndarray\n  try: MDSWriter"
        )
    if dtype is not None and kind != "bytes":
        why = f"column {column} of {path} has the encoding {encoding}, which records the dtype"
        raise ConfigError("--dtype", dtype, why=why, remedy="leave it out")


def _check_file(file: _Compressed, size: int | None) -> None:
    codec = (file.codec or "").partition(":")[0]
    if codec in _ARROW_CODECS and not pa.Codec.is_available(_ARROW_CODECS[codec]):
        why = f"{file.path} is compressed with {codec}, which this pyarrow was built without"
        raise DataError(f"{why}\n  try: pip install pyarrow from PyPI, or decompress the folder")
    if codec and codec not in {*_ARROW_CODECS, "gz", "bz2"}:
        raise DataError(f"{file.path} is compressed with {codec}, which is not known\n  try: decompress the folder")
    try:
        found = file.path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{file.path} is missing, and {INDEX} lists it\n  try: {_AGAIN}") from None
    if size is not None and found != size:
        raise DataError(f"{file.path} has {found} bytes, {INDEX} says {size}: truncated\n  try: {_AGAIN}")
