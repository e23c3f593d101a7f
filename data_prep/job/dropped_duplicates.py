"""What deduplication has dropped, for the manifest and for the list of what was left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.dedup.components import EXACT_DUPLICATE, NEAR_DUPLICATE, drops_path
from data_prep.job.directory import Job
from data_prep.task import read_marker
from data_prep.tasks.sorted_runs import SortedRun

COPIES = "copies.jsonl"
"""In the job directory: the rows of dropped.jsonl for copies."""
_REASONS = {EXACT_DUPLICATE: "exact copy", NEAR_DUPLICATE: "near copy"}


def count_duplicates(job: Job) -> dict[str, int]:
    """How many documents were dropped as copies, by "step: reason"; empty without dedup."""
    counts = read_marker(job.copies) or {}
    return {f"dedup: {kind} copy": counts[kind] for kind in ("exact", "near") if counts.get(kind)}


def list_duplicates(job: Job, runs: Sequence[Path]) -> None:
    """Writes where each copy was, in the order of the input within a run's splits, if the config asks for a list.

    Args:
        runs: of all map tasks, in order. Their texts are not there any more, so the list has none.
    """
    if job.config.list_dropped == "no" or read_marker(job.copies) is None:
        return
    plan = job.load_plan()
    with (job.root / COPIES).open("w", encoding="ascii") as file:
        for i, path in enumerate(runs):
            drops = np.load(drops_path(job.copies, i))
            documents = SortedRun.open(path, whole=True).documents
            units = plan[int(path.parent.name)]
            gone = np.flatnonzero(drops)
            for number in gone[np.argsort(documents["rank"][gone])]:
                unit, row = units[int(documents["unit"][number])], documents[number]
                place = {"source": unit.source, "file": unit.file, "at": int(row["at"])}
                file.write(json.dumps({**place, "step": "dedup", "reason": _REASONS[int(drops[number])]}) + "\n")
