"""Reads any part of any tensor from a checkpoint's files (reshard on load). Without communication."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index

from headrace.base.errors import CheckpointError
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
"""What `torch.load` raises when it is given something else than what `torch.save` has written."""


@dataclass(frozen=True, eq=False)
class _Copy:
    """A rectangle that a stored shard and a wanted one have in common.

    Attributes:
        row: of the stored shard.
        stored_at: int64 [dims], offsets within the stored shard.
        sizes: int64 [dims].
        target: the values of the wanted shard in the rectangle, a view.
    """

    row: int
    stored_at: Ints
    sizes: Ints
    target: Tensor


class ShardReader:
    """Reads from one checkpoint.

    Args:
        directory: of the checkpoint.
        metadata: its metadata.
        files: where its files are read; in the directory when None.
    """

    def __init__(self, directory: Path, metadata: CheckpointMetadata, files: ShardFiles | None = None) -> None:
        self._files, self._metadata = files or ShardFiles(directory), metadata

    def read(self, state: State) -> None:
        """Fills the shards of a state in place.

        Every stored shard that is needed is read once, whole, in the order of the files.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or is not whole, or a file is damaged.
            OSError: a file cannot be read.
        """
        copies = [copy for key, value in state.items() for copy in self._copies(key, value)]
        metadata = self._metadata
        order = np.lexsort((metadata.position[rows := [copy.row for copy in copies]], metadata.file[rows]))
        last, values = -1, torch.empty(0)
        for copy in (copies[place] for place in order):
            if copy.row != last:
                last, values = copy.row, self._stored(copy.row)
            part = narrow_tensor_by_index(values, copy.stored_at.tolist(), copy.sizes.tolist())
            copy.target.copy_(part)

    def _copies(self, key: str, value: NamedShard | Tensor) -> Iterator[_Copy]:
        """What has to be copied into one entry of a state."""
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

    def _stored(self, row: int) -> Tensor:
        """The values of a stored shard."""
        metadata = self._metadata
        if metadata.file[row] < 0:
            raise CheckpointError("the metadata does not say where a shard lies")
        name, begin, length = metadata.files[metadata.file[row]], metadata.position[row], metadata.length[row]
        values = self._files.read(name, int(begin), int(length), _loaded)
        if values.shape != metadata.table.rectangle(row).sizes:
            raise CheckpointError(
                f"a shard has shape {tuple(values.shape)}, and the metadata says {metadata.table.rectangle(row).sizes}"
            )
        return values


def _loaded(view: IO[bytes], name: str) -> Tensor:
    try:
        values: Tensor = torch.load(view, map_location="cpu", weights_only=True)
    except _LOADING_ERRORS as error:
        raise CheckpointError(f"{name} is damaged: {error}") from None
    return values
