"""What a run of the job keeps of its documents for deduplication, and how pairs of copies are found in it.

    exact.*.npy  a `table` of the texts' 128-bit hashes: one row, of two words
    near.*.npy   a `table` of the band hashes: a row per band
    rank.npy     int64[documents]: of copies, the one of the smallest rank in the whole job stays

A pairs task takes one row and one range of hashes over all runs and writes the pairs of documents with equal hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config.dedup import DedupSection
from data_prep.dedup.merge_tasks import TablePlan, Tables
from data_prep.dedup.pairs import PAIRS, write_pairs
from data_prep.dedup.table import Hashes, Numbers, Range, write_table
from data_prep.task import Counts, DirectoryTask, Report

EXACT, NEAR, RANK = "exact", "near", "rank.npy"


def write_run(directory: Path, *, rank: Numbers, hashes: Hashes | None = None, bands: Hashes | None = None) -> None:
    """Writes a run's part of deduplication into its directory.

    Args:
        directory: where the run is being written.
        rank: int64[documents], in the order of the run's documents, as all that follows.
        hashes: uint64[documents, 2], 128 bits of each text; None without exact deduplication.
        bands: uint64[documents, bands], see `minhash.bands`; None without near deduplication.
    """
    np.save(directory / RANK, rank)
    if hashes is not None:
        write_table(directory, EXACT, hashes.T[None])
    if bands is not None:
        write_table(directory, NEAR, bands.T[:, None])


@dataclass(frozen=True)
class PairsTask(DirectoryTask):
    """Finds the documents that share a hash of `row` within a range, in all tables; writes `directory/pairs.bin`.

    Its memory is that of a range (see `table.MEMORY`) and of one table's piece of it.
    """

    tables: Tables
    row: int
    within: Range
    directory: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"dedup task {self.directory.name}"

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        with (scratch / PAIRS).open("wb") as file:
            found, _ = write_pairs(self.tables.pieces(row=self.row, within=self.within), file)
        report(Counts())
        return {"pairs": found}


def table_plans(
    section: DedupSection, *, runs: Sequence[Path], documents: Numbers, directory: Path
) -> tuple[list[TablePlan], list[TablePlan]]:
    """How the tables for exact and for near duplicates in `runs` are read.

    Args:
        runs: the runs' directories; their order numbers them, and does not change what is dropped.
        documents: int64[runs], about how many each has.
        directory: for the tasks' own ones.
    """
    rest = documents, runs, directory
    exact = [TablePlan(EXACT, 1, *rest)] if section.exact else []
    near = [TablePlan(NEAR, section.near.bands, *rest)] if section.near else []
    return exact, near


def pairs_tasks(plans: Sequence[TablePlan]) -> list[PairsTask]:
    """The tasks that find the copies in some tables, which are there, in subdirectories of the plans' directories."""
    return [
        PairsTask(tables, row, within, plan.directory / f"{plan.name}-{row:03d}-{within.part:05d}")
        for plan, tables, ranges in [(plan, plan.tables, plan.ranges()) for plan in plans]
        for row in range(plan.rows)
        for within in ranges
    ]


def pairs_of(plan: TablePlan) -> list[Path]:
    """The directories that have the pairs of a plan's tables when all its tasks have finished."""
    return [task.directory for task in (*plan.tasks(), *pairs_tasks([plan]))]
