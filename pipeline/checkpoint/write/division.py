"""Divides the shards of all ranks among them: each replica is written once, and each rank writes about equal bytes.

Runs on rank 0, on arrays only: a million shards take a second or two.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foundation.errors import CheckpointError
from pipeline.checkpoint.format.coverage import coverage_errors, mixed, shards_outside
from pipeline.checkpoint.format.shard_table import Ints, ShardTable, StoredTensor, most_dims


@dataclass(frozen=True, eq=False)
class Division:
    """Assignment of shards to the ranks that write them.

    Attributes:
        table: every shard of the checkpoint once.
        writer: int64 [N], the rank that writes each row of `table`.
        local_row: int64 [N], index of the row in the writer's own table.
        ranks: number of ranks.
    """

    table: ShardTable
    writer: Ints
    local_row: Ints
    ranks: int

    @cached_property
    def file_order(self) -> Ints:
        """int64 [N]: rows of `table`, sorted by the rank that writes them, then by row in its own table."""
        return np.lexsort((self.local_row, self.writer))

    @cached_property
    def borders(self) -> Ints:
        """int64 [ranks + 1]: first index of every rank's rows in `file_order`."""
        return np.searchsorted(self.writer[self.file_order], np.arange(self.ranks + 1))

    def written_by(self, rank: int) -> Ints:
        """Returns the rows of `table` that a rank writes, in the order in which it writes them."""
        return self.file_order[self.borders[rank] : self.borders[rank + 1]]


def divide(tables: Sequence[ShardTable]) -> Division:
    """Divides the shards of all ranks among them.

    Args:
        tables: shard table of each rank.

    Raises:
        CheckpointError: ranks disagree about a tensor, or their shards do not cover a tensor exactly once.
    """
    tensors, numbers = _all_tensors(tables)
    counts = np.array([len(table) for table in tables])
    rank = np.repeat(np.arange(len(tables)), counts)
    local_row = np.concatenate([np.arange(count) for count in counts])
    rows = _joined(tensors, tables, numbers)
    _raise_first(shards_outside(rows))
    first, last = _corners(rows)
    order = np.lexsort((last, first))  # stable: replicas stay in the order of their ranks
    first, last = first[order], last[order]
    starts = np.flatnonzero(np.concatenate([[True], (first[1:] != first[:-1]) | (last[1:] != last[:-1])])[: len(order)])
    chosen = order[_balanced(starts, rank[order], rows.row_bytes[order], ranks=len(tables))]
    table = ShardTable(tensors, rows.tensor_of_row[chosen], rows.offsets[chosen], rows.sizes[chosen])
    _raise_first(coverage_errors(table))
    return Division(table, rank[chosen], local_row[chosen], len(tables))


def _raise_first(problems: Iterator[tuple[str, str]]) -> None:
    for key, why in problems:
        raise CheckpointError(f"the shards of all ranks do not make up a complete state: {key}: {why}")


def _all_tensors(tables: Sequence[ShardTable]) -> tuple[tuple[StoredTensor, ...], list[Ints]]:
    """Returns the tensors of all ranks, in order of first appearance, and for each rank the indices of its own."""
    number: dict[str, int] = {}
    found: list[StoredTensor] = []
    seen: dict[int, Ints] = {}
    for rank, table in enumerate(tables):
        if id(table.tensors) in seen:
            continue
        for each in table.tensors:
            if number.setdefault(each.key, len(found)) == len(found):
                found.append(each)
            elif found[number[each.key]] != each:
                raise CheckpointError(f"rank {rank} has {each}, and a rank before it {found[number[each.key]]}")
        seen[id(table.tensors)] = np.array([number[each.key] for each in table.tensors], dtype=np.int64)
    return tuple(found), [seen[id(table.tensors)] for table in tables]


def _joined(tensors: tuple[StoredTensor, ...], tables: Sequence[ShardTable], numbers: Sequence[Ints]) -> ShardTable:
    """Concatenates the rows of all ranks, in the order of the ranks, not of the tensors."""
    dims = most_dims(tensors)
    offsets = np.concatenate([_widened(table.offsets, dims, 0) for table in tables])
    sizes = np.concatenate([_widened(table.sizes, dims, 1) for table in tables])
    own = [number[table.tensor_of_row] for table, number in zip(tables, numbers, strict=True)]
    return ShardTable(tensors, np.concatenate(own), offsets, sizes)


def _widened(values: Ints, dims: int, fill: int) -> Ints:
    return np.pad(values, ((0, 0), (0, dims - values.shape[1])), constant_values=fill)


def _corners(rows: ShardTable) -> tuple[Ints, Ints]:
    """Returns flat indices of the first and last element of every row, int64 [N] each, with all tensors concatenated.

    The two determine the rectangle of a row that lies inside its tensor, and sort rows in the order of the tensors.
    """
    shapes = np.maximum(rows.shapes, 1)
    strides = np.concatenate(
        [np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1], np.ones((len(shapes), 1), np.int64)], axis=1
    )
    begins = np.concatenate([[0], np.cumsum(shapes.prod(axis=1))])[:-1]
    strides, begins = strides[rows.tensor_of_row], begins[rows.tensor_of_row]
    first = begins + (rows.offsets * strides).sum(axis=1)
    return first, first + ((rows.sizes - 1) * strides).sum(axis=1)


def _balanced(starts: Ints, rank: Ints, row_bytes: Ints, *, ranks: int) -> Ints:
    """Chooses a row to write per group of replicas, int64 [groups]: that of the rank with the fewest bytes so far.

    Args:
        starts: first row of every group.
        rank: int64 [N], rank of every row, increasing within a group.
        row_bytes: int64 [N], bytes of every row.
        ranks: number of ranks.
    """
    copies = np.diff(np.concatenate([starts, [len(rank)]]))
    chosen = starts.copy()
    alone = copies == 1
    load = np.bincount(rank[starts[alone]], weights=row_bytes[starts[alone]], minlength=ranks)
    for groups in _of_the_same_ranks(np.flatnonzero(~alone), starts, copies, rank, row_bytes):
        who = rank[starts[groups[0]] : starts[groups[0]] + copies[groups[0]]]
        heap = [(float(load[each]), place) for place, each in enumerate(who)]
        heapq.heapify(heap)
        for group, size in zip(groups.tolist(), row_bytes[starts[groups]].tolist(), strict=True):
            bytes_so_far, place = heap[0]
            heapq.heapreplace(heap, (bytes_so_far + size, place))
            chosen[group] += place
        for bytes_so_far, place in heap:
            load[who[place]] = bytes_so_far
    return chosen


def _of_the_same_ranks(groups: Ints, starts: Ints, copies: Ints, rank: Ints, row_bytes: Ints) -> list[Ints]:
    """Collects the groups that the same ranks have, the largest group first; arguments as in `_balanced`."""
    if not len(groups):
        return []
    holders = np.add.reduceat(mixed(rank, 0), starts)  # a hash of the ranks of every group
    groups = groups[np.lexsort((-row_bytes[starts[groups]], holders[groups], copies[groups]))]
    changes = (np.diff(holders[groups]) != 0) | (np.diff(copies[groups]) != 0)
    return np.split(groups, np.flatnonzero(changes) + 1)
