"""Exact and near duplicates that were dropped: counts for the manifest, and rows for dropped.jsonl."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.components import EXACT_DUPLICATE, NEAR_DUPLICATE, SEEN, drops_path
from data_prep.job.directory import Job
from data_prep.task import read_marker
from data_prep.tasks.sorted_runs import SortedRun

DUPLICATES_FILE = "copies.jsonl"
"""File in the job directory with the rows of dropped.jsonl for duplicates."""
_REASONS = {EXACT_DUPLICATE: "exact copy", NEAR_DUPLICATE: "near copy", SEEN: "seen"}


def count_duplicates(job: Job) -> dict[str, int]:
    """Counts documents dropped as duplicates or as seen, by "step: reason"; empty without deduplication."""
    counts = read_marker(job.duplicates) or {}
    return {f"dedup: {reason}": counts[key] for reason in _REASONS.values() if counts.get(key := reason.split()[0])}


def describe_clusters(job: Job, runs: Sequence[Path]) -> dict[str, Any] | None:
    """Describes the clusters of duplicates for the manifest; None without deduplication.

    The description has their `sizes` (see `ComponentsTask`), the places of the kept documents of the `largest`, and
    what each of the `sources` lost.
    """
    if (marker := read_marker(job.duplicates)) is None:
        return None
    labels, plan = [source.label for source in job.config.sources], job.load_plan()
    lost: dict[str, Counter[str]] = {label: Counter() for label in labels}
    for i, path in enumerate(runs):
        drops, sources = np.load(drops_path(job.duplicates, i)), SortedRun.open(path, whole=True).documents["source"]
        for kind in (EXACT_DUPLICATE, NEAR_DUPLICATE):
            for label, count in zip(labels, np.bincount(sources[drops == kind], minlength=len(labels)), strict=True):
                lost[label][_REASONS[kind]] += int(count)
    largest: list[dict[str, Any]] = []
    for size, run, index in marker.get("largest", []):
        document = SortedRun.open(runs[run]).documents[index]
        unit = plan[int(runs[run].parent.name)][int(document["unit"])]
        largest.append({"documents": size, "source": unit.source, "file": unit.file, "at": int(document["at"])})
    losses = {label: dict(+counts) for label, counts in lost.items() if +counts}
    return {"sizes": marker.get("sizes", []), "largest": largest, "sources": losses}


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
    """Writes the location of each duplicate, by run and in input order, if the config asks for a list.

    Args:
        runs: directories of the runs of all map tasks, in order. Runs have no texts, and neither has the list.
    """
    if job.config.list_dropped == "no" or read_marker(job.duplicates) is None:
        return
    plan = job.load_plan()
    with (job.root / DUPLICATES_FILE).open("w", encoding="ascii") as file:
        for i, path in enumerate(runs):
            drops = np.load(drops_path(job.duplicates, i))
            documents = SortedRun.open(path, whole=True).documents
            units = plan[int(path.parent.name)]
            dropped = np.flatnonzero((drops == EXACT_DUPLICATE) | (drops == NEAR_DUPLICATE))
            for number in dropped[np.argsort(documents["rank"][dropped])]:
                unit, row = units[int(documents["unit"][number])], documents[number]
                location = {"source": unit.source, "file": unit.file, "at": int(row["at"])}
                file.write(json.dumps({**location, "step": "dedup", "reason": _REASONS[int(drops[number])]}) + "\n")
