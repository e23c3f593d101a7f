"""Tables of many runs, put together before copies are looked for in them. Only in jobs of very many runs.

A pairs task has one range of the hashes, of every run. With R runs of N documents each there are about R x N ranges
(times the bytes of an item, over `MEMORY`), so R x R small pieces are read: the square of the corpus. Put together in
groups of about sqrt(R), it is R x sqrt(R). That costs one more pass over the hashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep.dedup.pairs import PAIRS, write_pairs
from data_prep.dedup.table import Numbers, Range, TableSlice, ranges, read_slice
from data_prep.task import Counts, DirectoryTask, Report

MOST_RUNS = 1 << 10
"""From here on there are some ranges, and one more pass costs less than opening each run's table (0.9 ms) for each."""
_HASHES, _NUMBERS = "hashes.npy", "numbers.npy"


class Tables(Protocol):
    """All tables of one kind in a job."""

    def pieces(self, *, row: int, within: Range) -> Iterator[TableSlice]:
        """Yields what they have in a range of a row, by ascending run."""


@dataclass(frozen=True)
class RunTables:
    """The tables called `name` that runs have. first: the number of the first of the runs in the job."""

    name: str
    runs: Sequence[Path]
    first: int = 0

    def pieces(self, *, row: int, within: Range) -> Iterator[TableSlice]:
        """See `Tables.pieces`: one piece for each run."""
        for number, directory in enumerate(self.runs, self.first):
            yield read_slice(number, directory, self.name, row=row, within=within)


@dataclass(frozen=True)
class TableTask(DirectoryTask):
    """Puts together what some runs have in a range of a row: `hashes.npy`, uint64[words, items], ascending, each once,
    and `numbers.npy`, int64[items], whose they are first. Who else has them is in `pairs.bin`.

    Its memory is that of a range (see `table.MEMORY`).
    """

    tables: RunTables
    row: int
    within: Range
    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"table task {self.directory.name}"

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        with (scratch / PAIRS).open("wb") as file:
            found, piece = write_pairs(self.tables.pieces(row=self.row, within=self.within), file)
        np.save(scratch / _HASHES, piece.hashes)
        np.save(scratch / _NUMBERS, piece.numbers)
        report(Counts())
        return {"items": len(piece.numbers), "pairs": found}


@dataclass(frozen=True)
class MergedTables:
    """Tables that were put together by `groups` groups of `each` runs and by `parts` ranges."""

    tables: RunTables
    each: int
    parts: int
    directory: Path

    @property
    def groups(self) -> int:
        """How many groups the runs make."""
        return -(-len(self.tables.runs) // self.each)

    def tasks(self, rows: int) -> list[TableTask]:
        """Those that put them together."""
        groups = [self._group(group) for group in range(self.groups)]
        return [
            TableTask(tables, row, Range(part, self.parts), self._path(row, part, group))
            for row in range(rows)
            for part in range(self.parts)
            for group, tables in enumerate(groups)
        ]

    def pieces(self, *, row: int, within: Range) -> Iterator[TableSlice]:
        """See `Tables.pieces`: one piece for each group. `within` lies in one of the `parts`."""
        part = within.part * self.parts // within.parts
        for group in range(self.groups):
            directory = self._path(row, part, group)
            hashes = np.load(directory / _HASHES, mmap_mode="r")
            cut = within.cut(hashes[0])
            numbers = np.load(directory / _NUMBERS, mmap_mode="r")
            yield TableSlice(np.array(hashes[:, cut]), np.array(numbers[cut]))

    def _group(self, group: int) -> RunTables:
        first = group * self.each
        return RunTables(self.tables.name, self.tables.runs[first : first + self.each], first)

    def _path(self, row: int, part: int, group: int) -> Path:
        return self.directory / f"{self.tables.name}-table-{row:03d}-{part:05d}-{group:05d}"


@dataclass(frozen=True)
class TablePlan:
    """How the tables of a kind are read.

    Args:
        items: int64[runs], about how many each has in a row.
        directory: for the tasks' own ones.
    """

    name: str
    rows: int
    items: Numbers
    runs: Sequence[Path]
    directory: Path

    @property
    def tables(self) -> RunTables | MergedTables:
        """The runs' own where runs are few, or else merged ones."""
        own, runs = RunTables(self.name, self.runs), len(self.runs)
        if runs <= MOST_RUNS:
            return own
        each = math.isqrt(runs - 1) + 1
        largest = int(np.add.reduceat(self.items, np.arange(0, runs, each)).max())
        return MergedTables(own, each, len(ranges(largest)), self.directory)

    def tasks(self) -> list[TableTask]:
        """What has to be done before the tables can be read."""
        tables = self.tables
        return tables.tasks(self.rows) if isinstance(tables, MergedTables) else []

    def ranges(self) -> list[Range]:
        """Those that fit into the memory of a task; none lies in two parts of merged tables."""
        tables, parts = self.tables, len(ranges(int(self.items.sum())))
        if isinstance(tables, MergedTables):
            parts = -(-parts // tables.parts) * tables.parts
        return [Range(part, parts) for part in range(parts)]
