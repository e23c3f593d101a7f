"""Data prep: what one process does that merges what 10,000 map tasks have left."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.dedup.line_tasks import DroppedLines, RepeatedLinesTask, write_line_hashes
from data_prep.dedup.merge_tasks import TablePlan
from data_prep.dedup.table import HashRange, write_table
from data_prep.formats.tokenfile import SPLITS
from data_prep.job.planning import ignore_progress
from data_prep.tasks.merge import MOST_RUNS, plan_merges
from data_prep.tasks.reduce import ReduceTask, Shard
from data_prep.tasks.runs_reader import KEYS, RunsReader, memory_bytes
from data_prep.tasks.sorted_runs import DOCUMENT, RunStream, SortedRunPaths, run_path, task_directory
from tests.scale.measuring import Figures, Part, measured

_DOCUMENTS, _TOKENS = 20, 50
"""Of a run, and of a document: a run of the product has 64 MiB, of which a merge reads some."""
_DTYPE = "<u2"


def _runs(count: int, work: Path) -> RunsReader:
    """Sorted runs of so many map tasks, one each."""
    rng = np.random.default_rng(0)
    ids = [memoryview(bytes(2 * _TOKENS))] * _DOCUMENTS
    documents = np.zeros(_DOCUMENTS, DOCUMENT)
    documents["tokens"] = _TOKENS
    for task in range(count):
        documents["key"] = np.sort(rng.integers(0, KEYS, _DOCUMENTS, dtype=np.uint64))
        documents["rank"] = np.arange(_DOCUMENTS) + task * _DOCUMENTS
        directory = task_directory(work / "map", task)
        directory.mkdir(parents=True)
        with RunStream(run_path(directory, 0), masked=False) as stream:
            stream.add(documents, ids, [])
    return RunsReader(SortedRunPaths(work / "map", (1,) * count), first=0, drops=None, dtype=_DTYPE, masked=False)


def merged(runs: int, work: Path) -> Figures:
    """A merge task, of very many runs, and the shard that is then written of what merge tasks have left."""
    reader = _runs(runs, work)
    plan = plan_merges(reader, runs * _DOCUMENTS * _TOKENS, directory=work / "merged")
    assert plan is not None
    first, *others = plan.tasks()
    for task in others:
        task.run(ignore_progress)
    with measured() as figures:
        first.run(ignore_progress)
        done = _reduced(plan.merged_reader(0, KEYS), runs, work)
    assert done["documents"] == runs * _DOCUMENTS
    return figures


def reduced(runs: int, work: Path) -> Figures:
    """A shard is written from all runs."""
    reader = _runs(runs, work)
    with measured() as figures:
        done = _reduced(reader, runs, work)
    assert done["documents"] == runs * _DOCUMENTS
    return figures


def _reduced(reader: RunsReader, runs: int, work: Path) -> dict[str, int]:
    documents = runs * _DOCUMENTS
    memory = int(memory_bytes(documents * _TOKENS, documents, dtype=_DTYPE, masked=False))
    shard = Shard(SPLITS[0], 0, 0, 0, KEYS, documents * _TOKENS, memory)
    out = work / "out"
    (out / SPLITS[0]).mkdir(parents=True)
    return ReduceTask(shard, reader, out, work / "marker.json").run(ignore_progress)


def tables(runs: int, work: Path) -> Figures:
    """Hash tables of a group of runs are merged, and those of all groups are read by a task that looks for pairs."""
    rng, items = np.random.default_rng(0), 50
    paths = [task_directory(work / "map", number) for number in range(runs)]
    for path in paths:
        path.mkdir(parents=True)
        write_table(path, "exact", rng.integers(0, 1 << 63, (1, 2, items), dtype=np.uint64))
    plan = TablePlan("exact", 1, np.full(runs, items), paths, work / "merged")
    first, *others = plan.tables.tasks(1)
    for task in others:
        task.run(ignore_progress)
    with measured() as figures:
        first.run(ignore_progress)
        found = sum(len(each.numbers) for each in plan.tables.slices(row=0, within=HashRange(0, 1)))
    assert found == runs * items
    return figures


def repeated(runs: int, work: Path) -> Figures:
    """The repeated lines in a range of hashes of all runs."""
    rng = np.random.default_rng(0)
    paths = [task_directory(work / "lines", number) for number in range(runs)]
    for path in paths:
        path.mkdir(parents=True)
        write_line_hashes(path, [rng.integers(1, 1 << 63, 50, dtype=np.uint64)])
    task = RepeatedLinesTask(1, HashRange(0, 1), tuple(paths), work / "found")
    with measured() as figures:
        assert task.run(ignore_progress)["lines"] == 0
    return figures


def dropped(parts: int, work: Path) -> Figures:
    """A map task reads which of its lines are dropped, from all ranges of hashes."""
    paths = [work / f"lines-{part:05d}" for part in range(parts)]
    for path in paths:
        path.mkdir()
        for name in ("within.bin", "across.bin"):
            np.arange(5, dtype="<i8").tofile(path / name)
    with measured() as figures:
        assert DroppedLines(paths, run=0).next_document(10).sum() == 5
    return figures


PARTS = [
    Part(
        "data prep: merging runs",
        "a merge task over very many runs, and a shard written from the merged runs; runs of 20 documents.",
        "runs",
        (5000, 10_000, 20_000, 40_000),
        10_000,
        merged,
    ),
    Part(
        "data prep: a shard without merging",
        "a shard is written from all runs, the largest number that is not merged first.",
        "runs",
        (512, 1024, 2048, MOST_RUNS),
        MOST_RUNS,
        reduced,
    ),
    Part(
        "data prep: merging hashes",
        "hash tables of a group of runs are merged, and a task that looks for pairs reads those of all groups.",
        "runs",
        (2500, 5000, 10_000, 20_000),
        10_000,
        tables,
    ),
    Part(
        "data prep: repeated lines",
        "a task finds the repeated lines in one range of hashes, of which every run has some.",
        "runs",
        (1250, 2500, 5000, 10_000),
        10_000,
        repeated,
        note="Lines are not merged first.",
    ),
    Part(
        "data prep: dropped lines",
        "a map task reads which of its lines are dropped, from two files for each range of 256 MB of hashes; the target"
        " has 5 x 10^10 lines, 50 for each of 10^9 documents.",
        "ranges",
        (2000, 4000, 8000, 16_000),
        16_000,
        dropped,
        note="This takes two operations per range, before the task cleans and tokenizes 10^5 documents.",
    ),
]
