"""The phases of a job: lists of tasks, each of which begins when all tasks of the one before have finished.

What a phase consists of is read from the job directory, so any process that sees it can run a share of any phase.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from data_prep.config.corpus import CorpusConfig
from data_prep.dedup.components import ComponentsTask
from data_prep.dedup.document_tasks import PairsTask, pairs_directories, table_plans
from data_prep.dedup.document_tasks import pairs_tasks as dedup_pairs_tasks
from data_prep.dedup.line_tasks import RepeatedLinesTask
from data_prep.dedup.line_tasks import repeated_lines_tasks as dedup_repeated_lines_tasks
from data_prep.dedup.merge_tasks import MergeTablesTask, TablePlan
from data_prep.executors.base import Executor
from data_prep.formats.tokenfile import SPLITS, dtype_for
from data_prep.job.directory import Job, identity_of
from data_prep.job.dropped_duplicates import count_duplicates, list_duplicates
from data_prep.job.finish import checked_markers, counted, finish
from data_prep.job.progress import Display
from data_prep.job.shards import dropped_counts, plan_shards
from data_prep.job.survey import check_cleaning, raise_empty, tokenizer_identity
from data_prep.task import Counts, Task, plain_errors, read_marker
from data_prep.tasks.map import MapTask, sum_counts
from data_prep.tasks.merge import MergePlan, MergeTask, plan_merges
from data_prep.tasks.reduce import ReduceTask
from data_prep.tasks.remove_lines import HashLinesTask, lines_section
from data_prep.tasks.runs_reader import KEYS, RunsReader, memory_bytes
from data_prep.tasks.sorted_runs import Array, SortedRunPaths
from headrace.base.directory import Manifest
from headrace.base.errors import ConfigError, DataError


@dataclass(frozen=True)
class Phase:
    """One step of a job. tasks: makes its list; raises DataError where the phase before has not finished."""

    name: str
    words: str
    tasks: Callable[[Job], Sequence[Task]]


def phases_of(config: CorpusConfig) -> list[Phase]:
    """The phases of a job, in order."""
    dedup = config.dedup
    phases = [Phase("map", "read, clean and tokenise", map_tasks)]
    if dedup is not None and dedup.lines is not None:
        lines = [
            Phase("lines", "hash lines", hash_lines_tasks),
            Phase("repeated", "find repeated lines", repeated_lines_tasks),
        ]
        phases = [*lines, *phases]
    if dedup is not None and (dedup.exact or dedup.near is not None):
        tables = Phase("tables", "put hashes together, where there are very many runs", tables_tasks)
        pairs = Phase("pairs", "find documents that share hashes", pairs_tasks)
        phases += [tables, pairs, Phase("copies", "decide which copies are dropped", copies_tasks)]
    phases.append(Phase("merge", "merge runs, where there are very many", merge_tasks))
    return [*phases, Phase("reduce", "order and write shards", reduce_tasks)]


def run_phases(job: Job, executor: Executor) -> list[Display]:
    """Runs what is left of all phases. The caller holds the job alone."""
    return [run_phase(job, phase, executor)[1] for phase in phases_of(job.config)]


def run_phase(job: Job, phase: Phase, executor: Executor, *, share: tuple[int, int] = (0, 1)) -> tuple[int, Display]:
    """Runs what is left of a phase, or of every `share[1]`-th task of it from number `share[0]` on.

    Returns:
        how many tasks that are, and what was counted.
    """
    with os_errors_as_data_errors(phase.name):
        tasks = phase.tasks(job)[share[0] :: share[1]]
        todo = [task for task in tasks if not task.finished]
    if len(todo) < len(tasks):
        print(f"{len(tasks) - len(todo)} of {len(tasks)} {phase.name} tasks were finished before", file=sys.stderr)
    note = job.root / "progress" / f"{phase.name}-{share[0]:05d}.json"
    with _display(phase, tasks, todo, note) as display:
        for _ in executor.run(todo, report=display.add):
            pass
    return len(tasks), display


def run_share(config: CorpusConfig, name: str, executor: Executor, *, share: tuple[int, int]) -> tuple[int, Display]:
    """Runs a share of a phase for a scheduler that looks after the others; returns how many tasks it has.

    Raises:
        ConfigError: no such phase. DataError: the job was not prepared, or with another config.
    """
    job = prepared(config)
    named = {phase.name: phase for phase in phases_of(config)}
    if name not in named:
        raise ConfigError("PHASE", name, why="this job has no such phase", remedy=f"one of: {', '.join(named)}")
    with job.locked(shared=True):
        return run_phase(job, named[name], executor, share=share)


def complete(job: Job, *, tokenizer: str | None) -> Manifest:
    """Commits the output when all phases have finished. The caller holds the job alone.

    Args:
        tokenizer: fingerprint of the given tokenizer's files.

    Raises:
        DataError: something has not finished.
    """
    markers = checked_markers(job)
    tasks = _finished(reduce_tasks(job), "reduce")
    with os_errors_as_data_errors("finishing"):
        results = [(task.shard.split, task.run(_unheard)) for task in tasks]
        list_duplicates(job, _runs(job, markers))
        return finish(job, markers=markers, results=results, tokenizer=tokenizer)


def complete_prepared(config: CorpusConfig) -> Manifest:
    """`complete` for a job whose tasks were run by somebody else."""
    job = prepared(config)
    with job.locked():
        return complete(job, tokenizer=tokenizer_identity(config))


def prepared(config: CorpusConfig) -> Job:
    """The job of a config, which has been prepared.

    Raises:
        DataError: it was not, or with another config.
    """
    job = Job(config)
    saved = job.saved_identity()
    if saved is None or read_marker(job.tokenizer) is None:
        raise DataError(f"{job.root} holds no prepared job\n  try: python -m data_prep prepare --config FILE")
    with os_errors_as_data_errors("looking at the lists and the tokenizer"):
        tokenizer, cleaning = tokenizer_identity(config), check_cleaning(config)
    job.check_same(identity_of(config, listing=saved["inputs"], tokenizer=tokenizer, cleaning=cleaning), saved)
    return job


def hash_lines_tasks(job: Job) -> list[HashLinesTask]:
    """One for each entry of the plan."""
    plan = job.load_plan()
    return [HashLinesTask(i, units, job.config, job.lines_directory(i)) for i, units in enumerate(plan)]


def repeated_lines_tasks(job: Job) -> list[RepeatedLinesTask]:
    """One for each range of hashes of lines."""
    hashed = _finished(hash_lines_tasks(job), "lines")
    lines = sum(task.run(_unheard)["lines"] for task in hashed)
    return dedup_repeated_lines_tasks(
        lines_section(job.config), runs=[task.directory for task in hashed], lines=lines, directory=job.dedup
    )


def map_tasks(job: Job) -> list[MapTask]:
    """One for each entry of the plan."""
    found: Sequence[RepeatedLinesTask] = []
    if job.config.dedup is not None and job.config.dedup.lines is not None:
        found = _finished(repeated_lines_tasks(job), "repeated")
    return job.map_tasks(job.load_plan(), [task.directory for task in found])


def tables_tasks(job: Job) -> list[MergeTablesTask]:
    """For each group of runs, and ranges of each band and of the texts' own hashes; none where runs are few."""
    exact, near = _plans(job, checked_markers(job))
    return [task for plan in (*exact, *near) for task in plan.tasks()]


def pairs_tasks(job: Job) -> list[PairsTask]:
    """For each band, and for the texts' own hashes, one for each range of hashes."""
    return _pairs(_plans(job, checked_markers(job)))


def copies_tasks(job: Job) -> list[ComponentsTask]:
    """One."""
    return [_copies(job, checked_markers(job))]


def merge_tasks(job: Job) -> list[MergeTask]:
    """For each group of runs and range of keys; none where runs are few."""
    reader, kept, _ = _gather(job)
    merges = _merges(job, reader, kept)
    return merges.tasks() if merges is not None else []


def reduce_tasks(job: Job) -> list[ReduceTask]:
    """One for each shard."""
    reader, kept, memory = _gather(job)
    merges = _merges(job, reader, kept)
    if merges is not None:
        _finished(merges.tasks(), "merge")
        reader = merges.merged_reader(0, KEYS)
    shards = plan_shards(kept, memory, reader, shard_tokens=job.config.shard_tokens)
    return [
        ReduceTask(
            shard,
            reader if merges is None else merges.merged_reader(shard.low, shard.high),
            job.out,
            job.reduce_marker(shard.split, shard.index),
        )
        for shard in shards
    ]


def _merges(job: Job, reader: RunsReader, kept: Array) -> MergePlan | None:
    return plan_merges(reader, int(kept[:, :, 1].sum()), directory=job.merges)


def _gather(job: Job) -> tuple[RunsReader, Array, Array]:
    """All runs of the job, and what is dropped of them.

    Returns:
        them; int64 [sources, splits, 3], documents, tokens and bytes that are kept; int64 [sources, splits], what those
        that are read take in memory.
    """
    markers = checked_markers(job)
    described = read_marker(job.tokenizer)
    assert described is not None
    runs, drops = _runs(job, markers), None
    read = kept = sum_counts(markers)
    if job.config.dedup is not None and (job.config.dedup.exact or job.config.dedup.near is not None):
        (copies,) = _finished([_copies(job, markers)], "copies")
        drops = copies.directory
        kept = read - dropped_counts(runs, drops, shape=read.shape, cache=job.dedup / "dropped.json")
        dropped = counted(markers, "dropped") | count_duplicates(job)
        raise_empty(dict(zip(SPLITS, kept[:, :, 0].sum(axis=0).tolist(), strict=True)), job.config, dropped=dropped)
    dtype, masked = dtype_for(described["vocab_size"]).str, job.config.has_conversations
    memory = memory_bytes(read[:, :, 1], read[:, :, 0], dtype=dtype, masked=masked)
    return RunsReader(runs, 0, drops, dtype, masked), kept, np.asarray(memory)


def _copies(job: Job, markers: list[dict[str, Any]]) -> ComponentsTask:
    plans = _plans(job, markers)
    _finished(_pairs(plans), "pairs")
    exact, near = (tuple(directory for plan in of_kind for directory in pairs_directories(plan)) for of_kind in plans)
    return ComponentsTask(exact, near, _runs(job, markers), job.copies)


def _pairs(plans: tuple[list[TablePlan], list[TablePlan]]) -> list[PairsTask]:
    both = [plan for of_kind in plans for plan in of_kind]
    _finished([task for plan in both for task in plan.tasks()], "tables")
    return dedup_pairs_tasks(both)


def _plans(job: Job, markers: list[dict[str, Any]]) -> tuple[list[TablePlan], list[TablePlan]]:
    assert job.config.dedup is not None
    runs = np.array([marker["runs"] for marker in markers], np.int64)
    documents = np.array([np.sum(marker["counts"], axis=(0, 1))[0] for marker in markers], np.int64)
    each = np.repeat(-(-documents // np.maximum(runs, 1)), runs)
    return table_plans(job.config.dedup, runs=_runs(job, markers), documents=each, directory=job.dedup)


def _runs(job: Job, markers: list[dict[str, Any]]) -> SortedRunPaths:
    """The runs of all map tasks, which have said so in `markers`."""
    return SortedRunPaths(job.maps, tuple(marker["runs"] for marker in markers))


T = TypeVar("T", bound=Task)


def _finished(tasks: Sequence[T], phase: str) -> Sequence[T]:
    """The tasks of a phase, all of which have finished.

    Raises:
        DataError: some have not.
    """
    missing = [task.name for task in tasks if not task.finished]
    if missing:
        few = ", ".join(missing[:5])
        raise DataError(f"{len(missing)} of {len(tasks)} {phase} tasks have not finished: {few}\n  try: run them first")
    return tasks


def _unheard(_counts: Counts) -> None:
    """For tasks that have finished and only tell what they said."""


def _display(phase: Phase, tasks: Sequence[Task], todo: Sequence[Task], note: Path) -> Display:
    total, left = (sum(t.input_bytes for t in some if isinstance(t, MapTask | HashLinesTask)) for some in (tasks, todo))
    tokens = sum(t.tokens for t in todo if isinstance(t, MergeTask | ReduceTask))
    return Display(phase.name, total_bytes=total, done_bytes=total - left, total_tokens=tokens, note=note)
