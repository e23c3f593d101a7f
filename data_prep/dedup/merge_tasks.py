"""Merges the hash tables of groups of runs before the search for pairs. Only in jobs with very many runs.

A pairs task reads one range of the hashes of every run. With R runs of N documents each there are about R x N ranges
(times the bytes of an item, over `MEMORY`), and R x R small slices are read: the square of the corpus. If the tables of
about sqrt(R) runs are merged first, the reads are R x sqrt(R), at the cost of one more pass over the hashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep.dedup.table import PAIRS, HashRange, Numbers, TableSlice, ranges, read_slice, write_pairs
from data_prep.formats.memory_map import map_array
from data_prep.task import Counts, DirectoryTask, Report

MOST_RUNS = 1 << 10
"""Largest number of unmerged runs: with more, a pass costs less than opening each table (0.9 ms) for each range."""
_HASHES, _NUMBERS = "hashes.npy", "numbers.npy"


class Tables(Protocol):
    """All tables of one kind in a job."""

    def slices(self, *, row: int, within: HashRange) -> Iterator[TableSlice]:
        """Yields the tables' items in a range of a row, by ascending run."""


@dataclass(frozen=True)
class RunTables:
    """The tables with one `name` of some runs; `first`: number of the first of these runs in the job."""

    name: str
    runs: Sequence[Path]
    first: int = 0

    def slices(self, *, row: int, within: HashRange) -> Iterator[TableSlice]:
        """Implements `Tables.slices`: one slice for each run."""
        for number, directory in enumerate(self.runs, self.first):
            yield read_slice(number, directory, self.name, row=row, within=within)


@dataclass(frozen=True)
class MergeTablesTask(DirectoryTask):
    """Merges the tables of some runs in a range of a row.

    Writes `hashes.npy`, uint64[words, items], ascending, each hash once; `numbers.npy`, int64[items], the first item
    with each hash; and `pairs.bin`, the pairs of that item with all other items with the same hash. Memory: a range of
    the tables (see `table.MEMORY`).
    """

    kind = "table task"
    tables: RunTables
    row: int
    within: HashRange
    directory: Path

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        with (scratch / PAIRS).open("wb") as file:
            found, merged = write_pairs(self.tables.slices(row=self.row, within=self.within), file)
        np.save(scratch / _HASHES, merged.hashes)
        np.save(scratch / _NUMBERS, merged.numbers)
        report(Counts())
        return {"items": len(merged.numbers), "pairs": found}


@dataclass(frozen=True)
class MergedTables:
    """Tables merged by groups of `runs_per_group` runs and by `parts` ranges."""

    tables: RunTables
    runs_per_group: int
    parts: int
    directory: Path

    @property
    def groups(self) -> int:
        """Number of groups of runs."""
        return -(-len(self.tables.runs) // self.runs_per_group)

    def tasks(self, rows: int) -> list[MergeTablesTask]:
        """The tasks that merge the tables."""
        groups = [self._group(group) for group in range(self.groups)]
        return [
            MergeTablesTask(tables, row, HashRange(part, self.parts), self._path(row, part, group))
            for row in range(rows)
            for part in range(self.parts)
            for group, tables in enumerate(groups)
        ]

    def slices(self, *, row: int, within: HashRange) -> Iterator[TableSlice]:
        """Implements `Tables.slices`: one slice per group. `within` must lie in one of the `parts`."""
        part = within.part * self.parts // within.parts
        for group in range(self.groups):
            directory = self._path(row, part, group)
            hashes = map_array(directory / _HASHES)
            cut = within.cut(hashes[0])
            numbers = map_array(directory / _NUMBERS)
            yield TableSlice(np.array(hashes[:, cut]), np.array(numbers[cut]))

    def _group(self, group: int) -> RunTables:
        first = group * self.runs_per_group
        return RunTables(self.tables.name, self.tables.runs[first : first + self.runs_per_group], first)

    def _path(self, row: int, part: int, group: int) -> Path:
        return self.directory / f"{self.tables.name}-table-{row:03d}-{part:05d}-{group:05d}"


@dataclass(frozen=True)
class TablePlan:
    """Plan for reading all tables of one kind: unmerged, or merged by tasks.

    Args:
        items: int64[runs], approximate number of items of each run in a row.
        directory: parent of the tasks' directories.
    """

    name: str
    rows: int
    items: Numbers
    runs: Sequence[Path]
    directory: Path

    @property
    def tables(self) -> RunTables | MergedTables:
        """The runs' own tables for up to `MOST_RUNS` runs, else merged tables."""
        own, runs = RunTables(self.name, self.runs), len(self.runs)
        if runs <= MOST_RUNS:
            return own
        runs_per_group = math.isqrt(runs - 1) + 1
        largest = int(np.add.reduceat(self.items, np.arange(0, runs, runs_per_group)).max())
        return MergedTables(own, runs_per_group, len(ranges(largest)), self.directory)

    def tasks(self) -> list[MergeTablesTask]:
        """The tasks that have to finish before the tables can be read."""
        tables = self.tables
        return tables.tasks(self.rows) if isinstance(tables, MergedTables) else []

    def ranges(self) -> list[HashRange]:
        """Ranges that fit into a task's memory; none spans two parts of merged tables."""
        tables, parts = self.tables, len(ranges(int(self.items.sum())))
        if isinstance(tables, MergedTables):
            parts = -(-parts // tables.parts) * tables.parts
        return [HashRange(part, parts) for part in range(parts)]
