"""Shards of a rank or of a whole checkpoint as arrays, one row per shard.

A checkpoint of a 70B model on 512 ranks has 1.1 million shards. As Python objects they take gigabytes of memory and
minutes; as arrays, megabytes and tenths of a second.

Shapes: N rows (shards); D is the number of dims of the tensor with the most (at least 1). A tensor with fewer dims has
offset 0 and size 1 in the missing ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.checkpoint.format.shards import NamedShard
from pipeline.models.construction.rectangle import Rectangle

Ints = npt.NDArray[np.int64]
State = Mapping[str, NamedShard | Tensor]
"""The state dict of a rank: its shards, under the keys of `named_state`."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: its key as in `named_state`, full shape, and dtype of the elements."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class ShardTable:
    """Shards, in the order of their tensors unless said otherwise.

    Attributes:
        tensors: keys, shapes and dtypes.
        tensor_of_row: int64 [N], index of the tensor of every row.
        offsets: int64 [N, D], first index along every dim.
        sizes: int64 [N, D], length along every dim.
    """

    tensors: tuple[StoredTensor, ...]
    tensor_of_row: Ints
    offsets: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def first_row(self) -> Ints:
        """int64 [tensors + 1]: the rows of tensor t begin at first_row[t] and end before first_row[t + 1]."""
        return np.searchsorted(self.tensor_of_row, np.arange(len(self.tensors) + 1))

    @cached_property
    def index(self) -> dict[str, int]:
        """Key -> index of the tensor."""
        return {each.key: number for number, each in enumerate(self.tensors)}

    @cached_property
    def shapes(self) -> Ints:
        """int64 [tensors, D]: full shapes, 1 in dims that a tensor lacks."""
        return padded([each.shape for each in self.tensors], dims=self.offsets.shape[1], fill=1)

    @cached_property
    def row_bytes(self) -> Ints:
        """int64 [N]: bytes of the elements of every row."""
        itemsize = np.array([each.dtype.itemsize for each in self.tensors], dtype=np.int64)
        return np.asarray(self.sizes.prod(axis=1) * itemsize[self.tensor_of_row])

    def rows(self, tensor: int) -> range:
        """Returns the rows of a tensor."""
        return range(int(self.first_row[tensor]), int(self.first_row[tensor + 1]))

    def rectangle(self, row: int) -> Rectangle:
        """Offsets and sizes of a row, in as many dims as its tensor has."""
        dims = len(self.tensors[self.tensor_of_row[row]].shape)
        return Rectangle(tuple(self.offsets[row, :dims].tolist()), tuple(self.sizes[row, :dims].tolist()))

    def rectangles(self, tensor: int) -> list[Rectangle]:
        """Returns the shards of a tensor."""
        rows, dims = slice(*self.first_row[tensor : tensor + 2]), len(self.tensors[tensor].shape)
        pairs = zip(self.offsets[rows, :dims].tolist(), self.sizes[rows, :dims].tolist(), strict=True)
        return [Rectangle(tuple(offsets), tuple(sizes)) for offsets, sizes in pairs]


@dataclass(frozen=True, eq=False)
class CheckpointMetadata:
    """Contents of a checkpoint: its shards and their locations.

    Attributes:
        table: shards of the checkpoint.
        files: names of the files that hold the shards.
        file: int64 [N], index into `files`; -1 where the metadata does not say.
        position: int64 [N], first byte in the file.
        length: int64 [N], bytes in the file.
    """

    table: ShardTable
    files: tuple[str, ...]
    file: Ints
    position: Ints
    length: Ints

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors, in the order in which they were written."""
        return self.table.tensors


def padded(rows: Sequence[Sequence[int]], *, dims: int, fill: int) -> Ints:
    """Pads rows of different lengths to an int64 [rows, dims]."""
    flat: list[int] = []
    padding = [[fill] * (dims - length) for length in range(dims + 1)]
    for row in rows:
        flat += row
        flat += padding[len(row)]
    return np.array(flat, dtype=np.int64).reshape(len(rows), dims)


def most_dims(tensors: Sequence[StoredTensor]) -> int:
    """Returns D, the most dims of any tensor, at least 1."""
    return max([1, *(len(each.shape) for each in tensors)])


def table_of(state: State) -> ShardTable:
    """Makes the table of a rank's state, in the state's order; a tensor without elements has no shards."""
    tensors: list[StoredTensor] = []
    counts: list[int] = []
    offsets: list[Sequence[int]] = []
    sizes: list[Sequence[int]] = []
    for key, value in state.items():
        parts = parts_of(value)
        tensors.append(StoredTensor(key, tuple(value.shape), value.dtype))
        counts.append(len(parts))
        offsets += parts.keys()
        sizes += [part.shape for part in parts.values()]
    dims = most_dims(tensors)
    tensor_of_row = np.repeat(np.arange(len(tensors)), np.array(counts, dtype=np.int64))
    return ShardTable(
        tuple(tensors), tensor_of_row, padded(offsets, dims=dims, fill=0), padded(sizes, dims=dims, fill=1)
    )


def parts_of(value: NamedShard | Tensor) -> Mapping[tuple[int, ...], Tensor]:
    """Returns the shards of a state's entry: offsets -> values, a view in the shard's shape."""
    if isinstance(value, NamedShard):
        return value.parts
    return {(0,) * value.ndim: value} if value.numel() else {}


def all_parts(state: State) -> list[Tensor]:
    """Returns all shards of a state, in the order of its keys: the same on equal ranks of equal layouts."""
    return [part for value in state.values() for part in parts_of(value).values()]


def part_at(value: NamedShard | Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Returns the values of a shard of a state's entry, a view in the shard's shape."""
    return parts_of(value)[offsets].detach()


class EncodedTable(NamedTuple):
    """A table as two byte strings: names, shapes and dtypes, equal on many ranks; and the rows, different on each."""

    tensors: bytes
    rows: bytes

    @property
    def digests(self) -> tuple[bytes, bytes]:
        """SHA-256 of both parts."""
        return hashlib.sha256(self.tensors).digest(), hashlib.sha256(self.rows).digest()


def encode_table(table: ShardTable) -> EncodedTable:
    """Encodes a table as bytes."""
    arrays = (np.array(table.offsets.shape, dtype=np.int64), table.tensor_of_row, table.offsets, table.sizes)
    return EncodedTable(
        json.dumps(tensors_to_json(table.tensors)).encode(), b"".join(each.tobytes() for each in arrays)
    )


def decode_tensors(data: bytes) -> tuple[StoredTensor, ...]:
    """Decodes the first part of an encoded table."""
    return tensors_from_json(json.loads(data))


def decode_rows(tensors: tuple[StoredTensor, ...], data: bytes) -> ShardTable:
    """Decodes a table from its tensors and the second part of its encoding."""
    values = np.frombuffer(data, dtype=np.int64)
    rows, dims = values[:2]
    offsets, sizes = values[2 + rows :].reshape(2, rows, dims)
    return ShardTable(tensors, values[2 : 2 + rows], offsets, sizes)


def tensors_to_json(tensors: Sequence[StoredTensor]) -> list[list[Any]]:
    """Returns key, shape and dtype name of every tensor."""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in {each.dtype for each in tensors}}
    return [[each.key, each.shape, names[each.dtype]] for each in tensors]


def tensors_from_json(rows: Sequence[Sequence[Any]]) -> tuple[StoredTensor, ...]:
    """Inverts `tensors_to_json`.

    Raises:
        ValueError: an entry does not have the form that `tensors_to_json` makes.
    """
    found: list[StoredTensor] = []
    for key, shape, dtype in rows:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{key} has dtype {dtype} and shape {shape}")
        found.append(StoredTensor(key, tuple(shape), kind))
    return tuple(found)
