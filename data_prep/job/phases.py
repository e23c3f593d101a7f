"""The phases of a job: lists of tasks; a phase starts when all tasks of the one before have finished.

The tasks of a phase are read from the job directory, so any process that sees it can run a share of any phase.
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
from data_prep.job.directory import Job, job_identity
from data_prep.job.dropped_duplicates import count_duplicates, write_duplicates_list
from data_prep.job.finish import count_by_reason, finish, load_map_markers
from data_prep.job.preflight import check_splits_not_empty, cleaning_identity, tokenizer_identity
from data_prep.job.progress import Display
from data_prep.job.shards import dropped_counts, plan_shards
from data_prep.task import Counts, Task, os_errors_as_data_errors, read_marker
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
    """A phase. tasks: makes the list of its tasks; raises DataError if the phase before has not finished."""

    name: str
    description: str
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
        tables = Phase("tables", "merge hash tables, in jobs of very many runs", tables_tasks)
        pairs = Phase("pairs", "find documents that share hashes", pairs_tasks)
        phases += [tables, pairs, Phase("copies", "decide which duplicates are dropped", components_tasks)]
    phases.append(Phase("merge", "merge runs, in jobs of very many runs", merge_tasks))
    return [*phases, Phase("reduce", "sort and write shards", reduce_tasks)]


def run_phases(job: Job, executor: Executor) -> list[Display]:
    """Runs the unfinished tasks of all phases. The caller must hold the job's exclusive lock."""
    return [run_phase(job, phase, executor)[1] for phase in phases_of(job.config)]


def run_phase(job: Job, phase: Phase, executor: Executor, *, share: tuple[int, int] = (0, 1)) -> tuple[int, Display]:
    """Runs the unfinished tasks of a phase, or of every `share[1]`-th task of it from number `share[0]` on.

    Returns:
        number of tasks of the share, finished ones included, and the display with its counts.
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
    """Runs a share of a phase for a batch scheduler that starts the other shares; see `run_phase`.

    Raises:
        ConfigError: no such phase.
        DataError: the job was not prepared, or with another config.
    """
    job = load_prepared_job(config)
    by_name = {phase.name: phase for phase in phases_of(config)}
    if name not in by_name:
        raise ConfigError("PHASE", name, why="this job has no such phase", remedy=f"one of: {', '.join(by_name)}")
    with job.locked(shared=True):
        return run_phase(job, by_name[name], executor, share=share)


def commit_output(job: Job, *, tokenizer: str | None) -> Manifest:
    """Commits the output when all phases have finished. The caller must hold the job's exclusive lock.

    Args:
        tokenizer: fingerprint of the given tokenizer's files, or None.

    Raises:
        DataError: some tasks have not finished.
    """
    markers = load_map_markers(job)
    tasks = _require_finished(reduce_tasks(job), "reduce")
    with os_errors_as_data_errors("finishing"):
        results = [(task.shard.split, task.run(_ignore_progress)) for task in tasks]
        write_duplicates_list(job, _runs(job, markers))
        return finish(job, markers=markers, results=results, tokenizer=tokenizer)


def commit_prepared_job(config: CorpusConfig) -> Manifest:
    """`commit_output` for a job whose phases were run by other processes."""
    job = load_prepared_job(config)
    with job.locked():
        return commit_output(job, tokenizer=tokenizer_identity(config))


def load_prepared_job(config: CorpusConfig) -> Job:
    """The prepared job of a config.

    Raises:
        DataError: it was not prepared, or with another config.
    """
    job = Job(config)
    saved = job.saved_identity()
    if saved is None or read_marker(job.tokenizer) is None:
        raise DataError(f"{job.root} has no prepared job\n  try: headrace prep prepare --config FILE")
    with os_errors_as_data_errors("reading the cleaning lists and the tokenizer"):
        tokenizer, cleaning = tokenizer_identity(config), cleaning_identity(config)
    job.check_identity(job_identity(config, listing=saved["inputs"], tokenizer=tokenizer, cleaning=cleaning), saved)
    return job


def hash_lines_tasks(job: Job) -> list[HashLinesTask]:
    """One task for each entry of the plan."""
    plan = job.load_plan()
    return [HashLinesTask(i, units, job.config, job.lines_directory(i)) for i, units in enumerate(plan)]


def repeated_lines_tasks(job: Job) -> list[RepeatedLinesTask]:
    """One task for each range of line hashes."""
    hashed = _require_finished(hash_lines_tasks(job), "lines")
    lines = sum(task.run(_ignore_progress)["lines"] for task in hashed)
    return dedup_repeated_lines_tasks(
        lines_section(job.config), runs=[task.directory for task in hashed], lines=lines, directory=job.dedup
    )


def map_tasks(job: Job) -> list[MapTask]:
    """One task for each entry of the plan."""
    found: Sequence[RepeatedLinesTask] = []
    if job.config.dedup is not None and job.config.dedup.lines is not None:
        found = _require_finished(repeated_lines_tasks(job), "repeated")
    return job.map_tasks(job.load_plan(), [task.directory for task in found])


def tables_tasks(job: Job) -> list[MergeTablesTask]:
    """One task for each group of runs and range of hashes, of each band and of the text hashes; none with few runs."""
    exact, near = _table_plans(job, load_map_markers(job))
    return [task for plan in (*exact, *near) for task in plan.tasks()]


def pairs_tasks(job: Job) -> list[PairsTask]:
    """One task for each range of hashes, of each band and of the text hashes."""
    return _pairs(_table_plans(job, load_map_markers(job)))


def components_tasks(job: Job) -> list[ComponentsTask]:
    """A single task."""
    return [_components_task(job, load_map_markers(job))]


def merge_tasks(job: Job) -> list[MergeTask]:
    """One task for each group of runs and range of keys; none with few runs."""
    reader, kept, _ = _open_runs(job)
    plan = _merge_plan(job, reader, kept)
    return plan.tasks() if plan is not None else []


def reduce_tasks(job: Job) -> list[ReduceTask]:
    """One task for each shard."""
    reader, kept, memory = _open_runs(job)
    plan = _merge_plan(job, reader, kept)
    if plan is not None:
        _require_finished(plan.tasks(), "merge")
        reader = plan.merged_reader(0, KEYS)
    shards = plan_shards(kept, memory, reader, shard_tokens=job.config.shard_tokens)
    return [
        ReduceTask(
            shard,
            reader if plan is None else plan.merged_reader(shard.low, shard.high),
            job.out,
            job.reduce_marker(shard.split, shard.index),
        )
        for shard in shards
    ]


def _merge_plan(job: Job, reader: RunsReader, kept: Array) -> MergePlan | None:
    return plan_merges(reader, int(kept[:, :, 1].sum()), directory=job.merges)


def _open_runs(job: Job) -> tuple[RunsReader, Array, Array]:
    """Opens all runs of the job, without the dropped duplicates.

    Returns:
        a reader of the runs; int64 [sources, splits, 3], documents, tokens and bytes that are kept; int64 [sources,
        splits], memory in bytes of all that is read.
    """
    markers = load_map_markers(job)
    described = read_marker(job.tokenizer)
    assert described is not None
    runs, drops = _runs(job, markers), None
    read = kept = sum_counts(markers)
    if job.config.dedup is not None and (job.config.dedup.exact or job.config.dedup.near is not None):
        (components,) = _require_finished([_components_task(job, markers)], "copies")
        drops = components.directory
        kept = read - dropped_counts(runs, drops, shape=read.shape, cache=job.dedup / "dropped.json")
        dropped = count_by_reason(markers, "dropped") | count_duplicates(job)
        check_splits_not_empty(
            dict(zip(SPLITS, kept[:, :, 0].sum(axis=0).tolist(), strict=True)), job.config, dropped=dropped
        )
    dtype, masked = dtype_for(described["vocab_size"]).str, job.config.has_conversations
    memory = memory_bytes(read[:, :, 1], read[:, :, 0], dtype=dtype, masked=masked)
    return RunsReader(runs, 0, drops, dtype, masked), kept, np.asarray(memory)


def _components_task(job: Job, markers: list[dict[str, Any]]) -> ComponentsTask:
    plans = _table_plans(job, markers)
    _require_finished(_pairs(plans), "pairs")
    exact, near = (tuple(directory for plan in of_kind for directory in pairs_directories(plan)) for of_kind in plans)
    return ComponentsTask(exact, near, _runs(job, markers), job.duplicates)


def _pairs(plans: tuple[list[TablePlan], list[TablePlan]]) -> list[PairsTask]:
    both = [plan for of_kind in plans for plan in of_kind]
    _require_finished([task for plan in both for task in plan.tasks()], "tables")
    return dedup_pairs_tasks(both)


def _table_plans(job: Job, markers: list[dict[str, Any]]) -> tuple[list[TablePlan], list[TablePlan]]:
    assert job.config.dedup is not None
    runs = np.array([marker["runs"] for marker in markers], np.int64)
    documents = np.array([np.sum(marker["counts"], axis=(0, 1))[0] for marker in markers], np.int64)
    each = np.repeat(-(-documents // np.maximum(runs, 1)), runs)
    return table_plans(job.config.dedup, runs=_runs(job, markers), documents=each, directory=job.dedup)


def _runs(job: Job, markers: list[dict[str, Any]]) -> SortedRunPaths:
    """The runs of all map tasks, from their markers."""
    return SortedRunPaths(job.maps, tuple(marker["runs"] for marker in markers))


T = TypeVar("T", bound=Task)


def _require_finished(tasks: Sequence[T], phase: str) -> Sequence[T]:
    """Returns the tasks of a phase, all of which must have finished.

    Raises:
        DataError: some have not.
    """
    missing = [task.name for task in tasks if not task.finished]
    if missing:
        few = ", ".join(missing[:5])
        raise DataError(f"{len(missing)} of {len(tasks)} {phase} tasks have not finished: {few}\n  try: run them first")
    return tasks


def _ignore_progress(_counts: Counts) -> None:
    """For finished tasks, whose `run` only reads the marker."""


def _display(phase: Phase, tasks: Sequence[Task], todo: Sequence[Task], note: Path) -> Display:
    total, remaining = (
        sum(t.input_bytes for t in some if isinstance(t, MapTask | HashLinesTask)) for some in (tasks, todo)
    )
    tokens = sum(t.tokens for t in todo if isinstance(t, MergeTask | ReduceTask))
    return Display(phase.name, total_bytes=total, done_bytes=total - remaining, total_tokens=tokens, note=note)
