"""Document deduplication: the tables that each sorted run writes, and the tasks that find candidate pairs in them.

    exact.*.npy  a `table` of the texts' 128-bit hashes: one row, of two words
    near.*.npy   a `table` of the LSH band hashes: a row per band
    signatures.npy  uint8[documents, slots], see `verify.Signatures`; only if clusters are verified
    rank.npy     int64[documents]: of duplicates, the one with the smallest rank in the whole job is kept

A pairs task reads one row and one range of hashes from all runs and writes the pairs of documents with equal hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config.dedup import DedupSection
from data_prep.dedup.merge_tasks import TablePlan, Tables
from data_prep.dedup.table import PAIRS, Hashes, HashRange, Numbers, write_pairs, write_table
from data_prep.dedup.verify import Signatures
from data_prep.task import Counts, DirectoryTask, Report

EXACT, NEAR, RANK, SIGNATURES = "exact", "near", "rank.npy", "signatures.npy"
SEEN_RANKS = 1 << 62
"""Subtracted from the ranks of seen documents: negative ranks come before all others."""


def write_dedup_tables(
    directory: Path,
    *,
    rank: Numbers,
    hashes: Hashes | None = None,
    bands: Hashes | None = None,
    signatures: Signatures | None = None,
) -> None:
    """Writes the arrays that deduplication reads of one sorted run into the run's directory.

    Args:
        directory: the directory of the run.
        rank: int64[documents], in the order of the run's documents, like the other arrays; of duplicates the document
            with the smallest rank is kept.
        hashes: uint64[documents, 2], the 128-bit hash of each text; None without exact deduplication.
        bands: uint64[documents, bands], LSH band hashes (`minhash.band_hashes`); None without near deduplication.
        signatures: uint8[documents, slots], MinHash signatures; None if clusters are not verified.
    """
    np.save(directory / RANK, rank)
    if signatures is not None:
        np.save(directory / SIGNATURES, signatures)
    if hashes is not None:
        write_table(directory, EXACT, hashes.T[None])
    if bands is not None:
        write_table(directory, NEAR, bands.T[:, None])


@dataclass(frozen=True)
class PairsTask(DirectoryTask):
    """Finds the documents that share a hash of `row` within a range, in all tables; writes `directory/pairs.bin`.

    Memory: a range of all tables (see `table.MEMORY`), and one table's slice of it.
    """

    kind = "dedup task"
    tables: Tables
    row: int
    within: HashRange
    directory: Path

    def _work(self, scratch: Path, report: Report) -> dict[str, Any]:
        with (scratch / PAIRS).open("wb") as file:
            found, _ = write_pairs(self.tables.slices(row=self.row, within=self.within), file)
        report(Counts())
        return {"pairs": found}


def table_plans(
    section: DedupSection, *, runs: Sequence[Path], documents: Numbers, directory: Path
) -> tuple[list[TablePlan], list[TablePlan]]:
    """The plans that read the tables of exact and of near duplicates.

    Args:
        runs: directories of the runs. A run's number is its index here; the order does not change the result.
        documents: int64[runs], approximate number of documents in each run.
        directory: parent of the tasks' directories.

    Returns:
        (plans for exact duplicates, plans for near duplicates): one plan each, or none if the section turns it off.
    """
    rest = documents, runs, directory
    exact = [TablePlan(EXACT, 1, *rest)] if section.exact else []
    near = [TablePlan(NEAR, section.near.bands, *rest)] if section.near else []
    return exact, near


def pairs_tasks(plans: Sequence[TablePlan]) -> list[PairsTask]:
    """The tasks that find the pairs in existing tables, in subdirectories of the plans' directories."""
    return [
        PairsTask(tables, row, within, plan.directory / f"{plan.name}-{row:03d}-{within.part:05d}")
        for plan, tables, ranges in [(plan, plan.tables, plan.ranges()) for plan in plans]
        for row in range(plan.rows)
        for within in ranges
    ]


def pairs_directories(plan: TablePlan) -> list[Path]:
    """The directories that contain the pairs of a plan's tables when all its tasks have finished."""
    return [task.directory for task in (*plan.tasks(), *pairs_tasks([plan]))]
