"""Metadata of a checkpoint: its tensors, their shards, and the location of every shard.

`metadata.npz` is a NumPy archive of a JSON header and compressed arrays. The arrays in the last four lines below have
one element per shard, delta-encoded: the first value, then each value's difference from the one before. Consecutive
shards of equal size, written by one rank after the other, become a repeated number, which compresses to almost nothing.

    header            UTF-8 bytes: {"format": 1, "tensors": [[key, shape, dtype], ...], "files": [name, ...]}
    rows              shards of every tensor, in the order of "tensors"
    offset_0 ...      first index along dim 0, ...; 0 in dims that the tensor lacks
    size_0 ...        length along dim 0, ...; 1 in dims that the tensor lacks
    file_number       index into "files"
    position, length  byte range of the file in which `torch.save` has written the shard

Unlike a pickle, the archive cannot execute code. Earlier versions wrote torch.distributed.checkpoint's own `.metadata`,
a pickle. It can still be read; only torch's metadata classes are created.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.pickled_metadata import read_pickled
from pipeline.checkpoint.format.shard_table import (
    CheckpointMetadata,
    Ints,
    ShardTable,
    StoredTensor,
    most_dims,
    padded,
    tensors_from_json,
    tensors_to_json,
)

METADATA = "metadata.npz"
TORCH_METADATA = ".metadata"
"""Metadata file of torch.distributed.checkpoint, in checkpoints of version 0.4 and earlier."""
FORMAT = 1
_COMPRESSION = 1
"""Compression level of zlib: level 6 saves another third of 4 MB, and takes five times as long."""
_READING_ERRORS = (
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)
"""Exceptions that reading a damaged or foreign file raises."""


def metadata_name(directory: Path) -> str:
    """Returns the name of the file that holds a checkpoint's metadata."""
    return METADATA if (directory / METADATA).exists() else TORCH_METADATA


def read_metadata(directory: Path) -> CheckpointMetadata:
    """Reads the metadata of a checkpoint, of this version or an earlier one.

    Raises:
        CheckpointError: the metadata cannot be read.
    """
    try:
        if metadata_name(directory) == METADATA:
            return decode_metadata((directory / METADATA).read_bytes())
        return from_torch_metadata(read_pickled(directory / TORCH_METADATA))
    except _READING_ERRORS as error:
        why = f"there is neither {METADATA} nor {TORCH_METADATA}" if isinstance(error, FileNotFoundError) else error
        raise CheckpointError(f"{directory} has no readable metadata: {why}") from None


def encode_metadata(metadata: CheckpointMetadata) -> bytes:
    """Returns the contents of `metadata.npz`."""
    table = metadata.table
    header = {"format": FORMAT, "tensors": tensors_to_json(table.tensors), "files": metadata.files}
    arrays: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        "rows": np.diff(table.first_row),
        **{f"offset_{dim}": np.diff(table.offsets[:, dim], prepend=0) for dim in range(table.offsets.shape[1])},
        **{f"size_{dim}": np.diff(table.sizes[:, dim], prepend=0) for dim in range(table.sizes.shape[1])},
        "file_number": np.diff(metadata.file, prepend=0),
        "position": np.diff(metadata.position, prepend=0),
        "length": np.diff(metadata.length, prepend=0),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _narrowed(array), allow_pickle=False)
    return buffer.getvalue()


def _narrowed(array: Ints) -> Any:
    """Converts an array to the smallest dtype that holds its values."""
    least, most = (int(array.min()), int(array.max())) if array.size else (0, 0)
    narrow = np.promote_types(np.min_scalar_type(least), np.min_scalar_type(most))
    # for a negative value and one of 2^32 or more numpy chooses a float, which is not exact from 2^53 on
    return array.astype(np.int64 if narrow.kind == "f" else narrow)


def decode_metadata(data: bytes) -> CheckpointMetadata:
    """Inverts `encode_metadata`.

    Raises:
        CheckpointError: a later version wrote the data. ValueError, KeyError, ...: the data is damaged.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        header = json.loads(archive["header"].tobytes())
        if header["format"] > FORMAT:
            raise CheckpointError(
                f"the checkpoint's metadata has format {header['format']}, and this version reads {FORMAT}\n"
                f"  try: the version of headrace that wrote it, or a newer one"
            )
        tensors = tensors_from_json(header["tensors"])
        tensor_of_row = np.repeat(np.arange(len(tensors)), archive["rows"])
        names = (name for name in archive.files if name not in ("header", "rows"))
        columns = {name: np.cumsum(archive[name], dtype=np.int64) for name in names}
    if any(column.shape != tensor_of_row.shape for column in columns.values()):
        raise ValueError("its arrays have different lengths")
    offsets, sizes = (
        np.stack([columns[f"{kind}_{dim}"] for dim in range(most_dims(tensors))], axis=1) for kind in ("offset", "size")
    )
    table = ShardTable(tensors, tensor_of_row, offsets, sizes)
    files, file = tuple(map(str, header["files"])), columns["file_number"]
    if file.size and not -1 <= file.min() <= file.max() < len(files):
        raise ValueError("it names a file that it does not list")
    return CheckpointMetadata(table, files, file, columns["position"], columns["length"])


def storage_errors(
    metadata: CheckpointMetadata, sizes: Mapping[str, int], *, aliases: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields (key, error) for shards that cannot lie where the metadata says.

    Args:
        metadata: metadata of the checkpoint.
        sizes: file name -> bytes.
        aliases: whether several keys may share one stored shard.
    """
    table, file, begin = metadata.table, metadata.file, metadata.position
    end = begin + metadata.length

    def key(row: int) -> str:
        return table.tensors[int(table.tensor_of_row[row])].key

    for row in np.flatnonzero(file < 0).tolist():
        yield key(row), f"the metadata does not say where its shard at {table.rectangle(row).offsets} lies"
    limit = np.array([*(sizes.get(name, -1) for name in metadata.files), np.iinfo(np.int64).max])[file]
    for row in _last_of_each_file(file, limit < 0):
        yield key(row), f"it is in {metadata.files[file[row]]}, which the manifest does not list"
    for row in _last_of_each_file(file, (limit >= 0) & (end > limit)):
        yield key(row), f"it lies past the end of {metadata.files[file[row]]}"
    order = np.lexsort((end, begin, file))
    shared = (file[order][1:] == file[order][:-1]) & (begin[order][1:] < end[order][:-1]) & (file[order][1:] >= 0)
    if aliases:
        shared &= (begin[order][1:] != begin[order][:-1]) | (end[order][1:] != end[order][:-1])
    for place in np.flatnonzero(shared):
        one, other = order[place], order[place + 1]
        yield key(other), f"it shares bytes of {metadata.files[file[one]]} with {key(one)}"


def _last_of_each_file(file: Ints, wrong: npt.NDArray[np.bool_]) -> list[int]:
    rows = np.flatnonzero(wrong)[::-1]
    return [int(row) for row in rows[np.unique(file[rows], return_index=True)[1]]]


def from_torch_metadata(metadata: Metadata) -> CheckpointMetadata:
    """Converts torch's metadata to arrays.

    Raises:
        AttributeError, TypeError, ValueError: torch.distributed.checkpoint did not write the metadata.
    """
    entries = {k: e for k, e in metadata.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
    tensors = tuple(StoredTensor(key, tuple(e.size), e.properties.dtype) for key, e in entries.items())
    storage: dict[Any, Any] = dict(metadata.storage_data)
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
    names = {name: number for number, name in enumerate(sorted({info.relative_path for info in storage.values()}))}
    owner: list[int] = []
    shards: list[tuple[Any, Any]] = []
    locations: list[tuple[int, int, int]] = []
    for number, (key, entry) in enumerate(entries.items()):
        for chunk in entry.chunks:
            info = places.get((key, tuple(chunk.offsets)))
            owner.append(number)
            shards.append((chunk.offsets, chunk.sizes))
            locations.append((names[info.relative_path], info.offset, info.length) if info else (-1, 0, 0))
    dims = max([most_dims(tensors), *(len(offsets) for offsets, _ in shards)])
    offsets, sizes = (padded([s[n] for s in shards], dims=dims, fill=n) for n in (0, 1))
    table = ShardTable(tensors, np.array(owner, dtype=np.int64), offsets, sizes)
    file, position, length = np.array(locations, dtype=np.int64).reshape(-1, 3).T
    return CheckpointMetadata(table, tuple(names), file, position, length)
