"""Write plan: which rank writes which shards. It is made once, and again when the layout of a rank's state has changed.

Replicas are divided among the ranks that have them; each rank copies and writes only its own share.

    every save          every rank sends rank 0 two checksums of its shard table: one for names, one for rows
    a checksum is new   rank 0 asks one rank for each table that it has not seen, and divides the shards of all ranks
                        (`division`); every rank gets the rows that it writes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.shard_table import (
    Ints,
    ShardTable,
    State,
    StoredTensor,
    decode_rows,
    decode_tensors,
    encode_table,
    part_at,
    table_of,
)
from pipeline.checkpoint.write.division import Division, divide

Digests = tuple[bytes, bytes]


@dataclass(frozen=True, eq=False)
class WritePlan:
    """The shards that one rank writes.

    Attributes:
        rank: rank of this process.
        items: the shards, as torch.distributed.checkpoint describes them.
        division: division of the whole checkpoint, on rank 0; None on other ranks.
    """

    rank: int
    items: tuple[WriteItem, ...]
    division: Division | None

    def value_lookup(self, state: State) -> Callable[[WriteItem], Tensor]:
        """Returns a function that looks up the values of a plan's item in a state."""
        return lambda item: part_at(state[item.index.fqn], tuple(item.index.offset or ()))


class Planner:
    """Makes the write plans of a run."""

    def __init__(self) -> None:
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._plan: WritePlan | None = None
        self._coordinator = Coordinator()

    def plan(self, state: State) -> WritePlan:
        """Divides a state's shards among the ranks; reuses the last plan if no layout has changed. Collective.

        Raises:
            CheckpointError: the shards of all ranks overlap, or do not cover a tensor.
        """
        table = table_of(state)
        encoded = encode_table(table)
        offered = self._gather(encoded.digests)
        asked = self._scatter(lambda: self._coordinator.missing(offered))
        if asked is None:
            assert self._plan is not None, "rank 0's plan covers all ranks"
            return self._plan
        self._plan = None
        sent = self._gather(tuple(part if ask else None for part, ask in zip(encoded, asked, strict=True)))
        rows = self._scatter(lambda: self._coordinator.divide(sent))
        if isinstance(rows, str):
            raise CheckpointError(rows)
        division = self._coordinator.division if self._rank == 0 else None
        self._plan = WritePlan(self._rank, write_items(table, rows), division)
        return self._plan

    def _gather(self, value: Any) -> list[Any]:
        """Gathers the values of all ranks on rank 0."""
        values: list[Any] = [value] * self._ranks
        if self._ranks > 1:
            dist.gather_object(value, values if self._rank == 0 else None)
        return values

    def _scatter(self, values: Callable[[], Sequence[Any]]) -> Any:
        """Receives this rank's value from rank 0."""
        received: list[Any] = list(values()) if self._rank == 0 else [None]
        if self._ranks > 1:
            own: list[Any] = [None]
            dist.scatter_object_list(own, received if self._rank == 0 else None)
            return own[0]
        return received[0]


class Coordinator:
    """Shard tables of all ranks, stored on rank 0 by checksum, so that equal tables are sent once."""

    def __init__(self) -> None:
        self.division: Division | None = None
        self._offered: list[Digests] = []
        self._tensors: dict[bytes, tuple[StoredTensor, ...]] = {}
        self._tables: dict[Digests, ShardTable] = {}

    def missing(self, offered: Sequence[Digests]) -> list[tuple[bool, bool] | None]:
        """Decides for every rank whether it sends its names, and whether its rows; None for all if nothing has changed.

        Args:
            offered: the checksums of every rank's table.
        """
        if self.division is not None and list(offered) == self._offered:
            return [None] * len(offered)
        self.division, self._offered = None, list(offered)
        names, tables = set(self._tensors), set(self._tables)
        asked: list[tuple[bool, bool] | None] = []
        for each in offered:
            asked.append((each[0] not in names, each not in tables))
            names.add(each[0])
            tables.add(each)
        return asked

    def divide(self, sent: Sequence[tuple[bytes | None, bytes | None]]) -> list[Any]:
        """Divides the shards; returns for each rank the rows of its table to write, in order, or an error message.

        Args:
            sent: for each rank the encoded names and rows that `missing` requested; None for others.
        """
        for digests, (names, rows) in zip(self._offered, sent, strict=True):
            if names is not None:
                self._tensors[digests[0]] = decode_tensors(names)
            if rows is not None:
                self._tables[digests] = decode_rows(self._tensors[digests[0]], rows)
        self._tensors = {each: self._tensors[each] for each, _ in self._offered}
        self._tables = {each: self._tables[each] for each in self._offered}
        try:
            division = divide([self._tables[each] for each in self._offered])
        except CheckpointError as error:
            return [str(error)] * len(sent)
        self.division = division
        return [division.local_row[division.written_by(rank)] for rank in range(division.ranks)]


def make_write_plan(state: State) -> WritePlan:
    """Makes a plan for one save. Collective.

    Raises:
        CheckpointError: the shards of all ranks overlap, or do not cover a tensor.
    """
    return Planner().plan(state)


def write_items(table: ShardTable, rows: Ints) -> tuple[WriteItem, ...]:
    """Converts rows of a rank's table to items of torch.distributed.checkpoint."""
    owners, offsets, sizes = (each[rows].tolist() for each in (table.tensor_of_row, table.offsets, table.sizes))
    properties = {each.dtype: TensorProperties(dtype=each.dtype) for each in table.tensors}
    items: list[WriteItem] = []
    for owner, offset, size in zip(owners, offsets, sizes, strict=True):
        key, shape, dtype = table.tensors[owner]
        at, chunk = torch.Size(offset[: len(shape)]), torch.Size(size[: len(shape)])
        data = TensorWriteData(ChunkStorageMetadata(at, chunk), properties[dtype], torch.Size(shape))
        items.append(WriteItem(MetadataIndex(key, at), WriteItemType.SHARD, tensor_data=data))
    return tuple(items)
