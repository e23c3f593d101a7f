"""Exact and near duplicates that were dropped: their counts for the manifest, and their rows for dropped.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.dedup.components import EXACT_DUPLICATE, NEAR_DUPLICATE, drops_path
from data_prep.job.directory import Job
from data_prep.task import read_marker
from data_prep.tasks.sorted_runs import SortedRun

DUPLICATES_FILE = "copies.jsonl"
"""In the job directory: the rows of dropped.jsonl for duplicates."""
_REASONS = {EXACT_DUPLICATE: "exact copy", NEAR_DUPLICATE: "near copy"}


def count_duplicates(job: Job) -> dict[str, int]:
    """Number of documents that were dropped as duplicates, by "step: reason"; empty without deduplication."""
    counts = read_marker(job.duplicates) or {}
    return {f"dedup: {kind} copy": counts[kind] for kind in ("exact", "near") if counts.get(kind)}


def duplicate_bytes(job: Job, runs: Sequence[Path]) -> dict[str, int]:
    """Bytes of UTF-8 of the documents that `count_duplicates` counts, by "step: reason"."""
    if not count_duplicates(job):
        return {}
    sums = dict.fromkeys(_REASONS, 0)
    for i, path in enumerate(runs):
        drops, sizes = np.load(drops_path(job.duplicates, i)), SortedRun.open(path, whole=True).documents["bytes"]
        for kind in _REASONS:
            sums[kind] += int(sizes[drops == kind].sum())
    return {f"dedup: {_REASONS[kind]}": size for kind, size in sums.items() if size}


def write_duplicates_list(job: Job, runs: Sequence[Path]) -> None:
    """Writes the location of each duplicate, by run and in the order of the input, if the config asks for a list.

    Args:
        runs: of all map tasks, in order. They do not contain the texts, so neither does the list.
    """
    if job.config.list_dropped == "no" or read_marker(job.duplicates) is None:
        return
    plan = job.load_plan()
    with (job.root / DUPLICATES_FILE).open("w", encoding="ascii") as file:
        for i, path in enumerate(runs):
            drops = np.load(drops_path(job.duplicates, i))
            documents = SortedRun.open(path, whole=True).documents
            units = plan[int(path.parent.name)]
            dropped = np.flatnonzero(drops)
            for number in dropped[np.argsort(documents["rank"][dropped])]:
                unit, row = units[int(documents["unit"][number])], documents[number]
                location = {"source": unit.source, "file": unit.file, "at": int(row["at"])}
                file.write(json.dumps({**location, "step": "dedup", "reason": _REASONS[int(drops[number])]}) + "\n")
