"""Reads any part of any tensor from a checkpoint's files (reshard on load). Without communication."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.shard_table import CheckpointMetadata, Ints, State, parts_of
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.checkpoint.memory.shard_files import ShardFiles

_LOADING_ERRORS = (
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
)
"""Exceptions that `torch.load` raises for bytes that `torch.save` did not write."""

_SMALL = 1 << 18
"""Largest shard, in bytes, that is always read whole: one request, where reading rows would need several."""


@dataclass(frozen=True, eq=False)
class _Copy:
    """A rectangle shared by a stored shard and a wanted shard.

    Attributes:
        row: row of the stored shard in the metadata's table.
        stored_at: int64 [dims], offsets within the stored shard.
        sizes: int64 [dims], lengths of the rectangle.
        target: values of the wanted shard in the rectangle, a view.
    """

    row: int
    stored_at: Ints
    sizes: Ints
    target: Tensor


class ShardReader:
    """Reads from one checkpoint.

    Args:
        directory: directory of the checkpoint.
        metadata: metadata of the checkpoint.
        files: sources of the checkpoint's files; the directory when None.
        foreign: whether another program wrote the checkpoint; its shards are read whole, with any strides.
        once: whether a caller reads a tensor in parts: then no row of a large shard is read for several parts.
    """

    def __init__(
        self,
        directory: Path,
        metadata: CheckpointMetadata,
        files: ShardFiles | None = None,
        *,
        foreign: bool = False,
        once: bool = False,
    ) -> None:
        self._files, self._metadata, self._foreign = files or ShardFiles(directory), metadata, foreign
        # share of a shard's rows below which these are read alone, and bytes up to which it is read whole, in one go
        self._in_rows = (1.0, 0) if once else (0.5, _SMALL)

    def read(self, state: State) -> None:
        """Fills the shards of a state in place.

        Every stored shard that is needed is read once, in the order of the files. If less than half of it is needed,
        only the rows along dim 0 from the first to the last needed one are read.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or is not whole, or a file is damaged.
            OSError: a file cannot be read.
        """
        copies = [copy for key, value in state.items() for copy in self._copies(key, value)]
        metadata = self._metadata
        order = np.lexsort((metadata.position[rows := [copy.row for copy in copies]], metadata.file[rows]))
        for row, of_row in groupby((copies[place] for place in order), key=lambda copy: copy.row):
            wanted = list(of_row)
            first = min((int(copy.stored_at[0]) for copy in wanted if copy.stored_at.size), default=0)
            end = max((int(copy.stored_at[0] + copy.sizes[0]) for copy in wanted if copy.sizes.size), default=1)
            values = self._stored(row, first, end)
            for copy in wanted:
                at = [each - first if dim == 0 else each for dim, each in enumerate(copy.stored_at.tolist())]
                copy.target.copy_(narrow_tensor_by_index(values, at, copy.sizes.tolist()))

    def _copies(self, key: str, value: NamedShard | Tensor) -> Iterator[_Copy]:
        """Yields the copies that fill one entry of a state."""
        table = self._metadata.table
        if key not in table.index:
            raise CheckpointError(f"{key} is not in the checkpoint")
        shape = table.tensors[table.index[key]].shape
        if shape != tuple(value.shape):
            raise CheckpointError(f"{key} has shape {shape} in the checkpoint, and here {tuple(value.shape)}")
        rows, dims = table.rows(table.index[key]), len(shape)
        begin = table.offsets[rows.start : rows.stop, :dims]
        end = begin + table.sizes[rows.start : rows.stop, :dims]
        for offsets, part in parts_of(value).items():
            low, high = np.maximum(begin, offsets), np.minimum(end, np.add(offsets, part.shape))
            hits = np.flatnonzero((low < high).all(axis=1))
            found = int((high - low)[hits].prod(axis=1).sum())
            if found != part.numel():
                raise CheckpointError(f"{part.numel() - found} elements of {key} are in no shard of the checkpoint")
            for hit in hits.tolist():
                sizes = high[hit] - low[hit]
                target = narrow_tensor_by_index(part.detach(), (low[hit] - offsets).tolist(), sizes.tolist())
                yield _Copy(rows.start + hit, low[hit] - begin[hit], sizes, target)

    def _stored(self, row: int, first: int, end: int) -> Tensor:
        """Reads rows [first, end) along the first dim of a stored shard; a scalar has one row."""
        metadata, shape = self._metadata, self._metadata.table.rectangle(row).sizes
        if metadata.file[row] < 0:
            raise CheckpointError("the metadata does not say where a shard lies")
        name, begin, length = metadata.files[metadata.file[row]], metadata.position[row], metadata.length[row]
        file = (name, int(begin), int(length))
        share, small = self._in_rows
        if not self._foreign and shape and end - first < share * shape[0] and length > small:
            dtype = metadata.table.tensors[metadata.table.tensor_of_row[row]].dtype
            nbytes = (end - first) * math.prod(shape[1:]) * dtype.itemsize
            parse = partial(_loaded_rows, first=first, end=end, shape=shape, dtype=dtype)
            part = self._files.read(*file, parse, nbytes=nbytes)
            if part is not None:
                return part
        values = self._files.read(*file, _loaded)
        if values.shape != shape:
            raise CheckpointError(f"a shard has shape {tuple(values.shape)}, and the metadata says {shape}")
        return values[first:end] if shape else values


def _loaded(view: IO[bytes], name: str) -> Tensor:
    try:
        values: Tensor = torch.load(view, map_location="cpu", weights_only=True)
    except _LOADING_ERRORS as error:
        raise CheckpointError(f"{name} is damaged: {error}") from None
    return values


def _loaded_rows(
    view: IO[bytes], _name: str, *, first: int, end: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """Reads rows of a tensor that `torch.save` has written; None if its layout differs from ours.

    Args:
        view: part of a file that contains the tensor.
        first, end: first row, and the row after the last.
        shape: shape of the whole tensor.
        dtype: dtype of the elements.
    """
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    try:
        archive = torch._C.PyTorchFileReader(view)
        begin = archive.get_record_offset("data/0")  # type: ignore[attr-defined]  # torch has no type for it
        size = archive.get_record_size("data/0")
        native = archive.get_record("byteorder") == sys.byteorder.encode()
    except (RuntimeError, OSError):
        return None  # reading the whole shard reports what is wrong
    if not native or size != shape[0] * row_bytes:
        return None
    view.seek(begin + first * row_bytes)
    values = torch.empty(end - first, *shape[1:], dtype=dtype)
    data = values.view(-1).view(torch.uint8).numpy()
    return values if view.readinto(data) == data.nbytes else None  # type: ignore[attr-defined]  # torch's view of a file
