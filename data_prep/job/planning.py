"""Facts for making the tasks of each phase, read from the job directory once earlier phases have finished.

`NAME_facts` reads markers and runs, O(tasks) files, and raises DataError if an earlier phase has not finished. Facts
are JSON. `NAME_tasks` makes the tasks from the facts. It opens only plan.json and the tokenizer's marker: a share of a
phase can use facts that another share has read, see `saved_plans.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, TypeVar

import numpy as np

from data_prep.dedup.components import ComponentsTask
from data_prep.dedup.document_tasks import PairsTask, pairs_directories, table_plans
from data_prep.dedup.document_tasks import pairs_tasks as dedup_pairs_tasks
from data_prep.dedup.line_tasks import RepeatedLinesTask
from data_prep.dedup.line_tasks import repeated_lines_tasks as dedup_repeated_lines_tasks
from data_prep.dedup.merge_tasks import MergeTablesTask, TablePlan
from data_prep.formats.tokenfile import SPLITS, dtype_for
from data_prep.job.directory import Job
from data_prep.job.dropped_duplicates import count_duplicates
from data_prep.job.finish import count_by_reason, load_map_markers
from data_prep.job.preflight import check_splits_not_empty
from data_prep.job.shards import dropped_counts, plan_shards
from data_prep.task import Counts, Marker, Task, read_marker
from data_prep.tasks.map import MapTask, sum_counts
from data_prep.tasks.merge import MergePlan, MergeTask, plan_merges
from data_prep.tasks.reduce import ReduceTask, Shard
from data_prep.tasks.remove_lines import HashLinesTask, lines_section
from data_prep.tasks.runs_reader import KEYS, RunsReader, memory_bytes
from data_prep.tasks.sorted_runs import SortedRunPaths
from foundation.errors import DataError

Facts = dict[str, Any]
"""JSON. `lines`: number of compared lines; `runs` and `documents`: numbers for each map task; `read` and `kept`:
[sources, splits, 3], documents, tokens and bytes before and after deduplication; `shards`: see `Shard`. Each phase has
only the facts that it needs."""


def lines_facts(_job: Job) -> Facts:
    """Returns no facts."""
    return {}


def lines_tasks(job: Job, _facts: Facts) -> list[HashLinesTask]:
    """One task for each entry of the plan."""
    return [HashLinesTask(i, units, job.config, job.lines_directory(i)) for i, units in enumerate(job.load_plan())]


def repeated_facts(job: Job) -> Facts:
    """The number of lines."""
    hashed = _require_finished(lines_tasks(job, {}), "lines")
    return {"lines": sum(task.run(ignore_progress)["lines"] for task in hashed), "tasks": len(hashed)}


def repeated_tasks(job: Job, facts: Facts) -> list[RepeatedLinesTask]:
    """One task for each range of line hashes."""
    hashed = [job.lines_directory(i) for i in range(facts["tasks"])]
    section = lines_section(job.config)
    return dedup_repeated_lines_tasks(section, runs=hashed, lines=facts["lines"], directory=job.dedup)


def map_facts(job: Job) -> Facts:
    """The numbers of lines and of the tasks that hashed them; empty without deduplication of lines."""
    if job.config.dedup is None or job.config.dedup.lines is None:
        return {}
    facts = repeated_facts(job)
    _require_finished(repeated_tasks(job, facts), "repeated")
    return facts


def map_tasks(job: Job, facts: Facts) -> list[MapTask]:
    """One task for each entry of the plan."""
    found = repeated_tasks(job, facts) if facts else []
    return job.map_tasks(job.load_plan(), [task.directory for task in found])


def tables_facts(job: Job) -> Facts:
    """Runs and documents of the map tasks."""
    return _facts_of_markers(load_map_markers(job))


def tables_tasks(job: Job, facts: Facts) -> list[MergeTablesTask]:
    """One task for each group of runs and range of hashes, for each band and the text hashes; none with few runs."""
    return [task for of_kind in _table_plans(job, facts) for plan in of_kind for task in plan.tasks()]


def pairs_facts(job: Job) -> Facts:
    """Runs and documents of the map tasks."""
    facts = tables_facts(job)
    _require_finished(tables_tasks(job, facts), "tables")
    return facts


def pairs_tasks(job: Job, facts: Facts) -> list[PairsTask]:
    """One task for each range of hashes, for each band and the text hashes."""
    return dedup_pairs_tasks([plan for of_kind in _table_plans(job, facts) for plan in of_kind])


def components_facts(job: Job) -> Facts:
    """Runs and documents of the map tasks."""
    facts = tables_facts(job)
    _require_duplicates_searched(job, facts)
    return facts


def components_tasks(job: Job, facts: Facts) -> list[ComponentsTask]:
    """A single task."""
    exact, near = (
        tuple(directory for plan in of_kind for directory in pairs_directories(plan))
        for of_kind in _table_plans(job, facts)
    )
    section = job.config.dedup.near if job.config.dedup is not None else None
    return [ComponentsTask(exact, near, runs_of(job, facts), job.duplicates, section)]


def merge_facts(job: Job) -> Facts:
    """Runs of the map tasks, and their contents by source and split.

    Raises:
        DataError: an earlier phase has not finished, or deduplication has emptied a split.
    """
    markers = load_map_markers(job)
    facts = _facts_of_markers(markers)
    read = kept = sum_counts(markers)
    if _has_document_dedup(job):
        _require_duplicates_searched(job, facts)
        (components,) = _require_finished(components_tasks(job, facts), "copies")
        cache = job.dedup / "dropped.json"
        kept = read - dropped_counts(runs_of(job, facts), components.directory, shape=read.shape, cache=cache)
        dropped = count_by_reason(markers, "dropped") | count_duplicates(job)
        documents = dict(zip(SPLITS, kept[:, :, 0].sum(axis=0).tolist(), strict=True))
        check_splits_not_empty(documents, job.config, dropped=dropped)
    return facts | {"read": read.tolist(), "kept": kept.tolist()}


def merge_tasks(job: Job, facts: Facts) -> list[MergeTask]:
    """One task for each group of runs and range of keys; none with few runs."""
    plan = _merge_plan(job, facts)
    return plan.tasks() if plan is not None else []


def reduce_facts(job: Job) -> Facts:
    """The facts of the merge phase, and the shards."""
    facts = merge_facts(job)
    plan, reader = _merge_plan(job, facts), _reader(job, facts)
    if plan is not None:
        _require_finished(plan.tasks(), "merge")
        reader = plan.merged_reader(0, KEYS)
    read, kept = np.array(facts["read"], np.int64), np.array(facts["kept"], np.int64)
    memory = memory_bytes(read[:, :, 1], read[:, :, 0], dtype=reader.dtype, masked=reader.masked)
    shards = plan_shards(kept, np.asarray(memory), reader, shard_tokens=job.config.shard_tokens)
    return facts | {"shards": [list(astuple(shard)) for shard in shards]}


def reduce_tasks(job: Job, facts: Facts) -> list[ReduceTask]:
    """One task for each shard."""
    plan, reader = _merge_plan(job, facts), _reader(job, facts)
    return [
        ReduceTask(
            shard,
            reader if plan is None else plan.merged_reader(shard.low, shard.high),
            job.out,
            job.reduce_marker(shard.split, shard.index),
            job.url,
        )
        for shard in (Shard(*values) for values in facts["shards"])
    ]


def runs_of(job: Job, facts: Facts) -> SortedRunPaths:
    """The runs of all map tasks."""
    return SortedRunPaths(job.maps, tuple(facts["runs"]))


def ignore_progress(_counts: Counts) -> None:
    """Ignores progress of finished tasks, whose `run` only reads the marker."""


def _facts_of_markers(markers: list[Marker]) -> Facts:
    documents = [int(np.sum(marker["counts"], axis=(0, 1))[0]) for marker in markers]
    return {"runs": [marker["runs"] for marker in markers], "documents": documents}


def _has_document_dedup(job: Job) -> bool:
    dedup = job.config.dedup
    return dedup is not None and (dedup.exact or dedup.near is not None)


def _require_duplicates_searched(job: Job, facts: Facts) -> None:
    _require_finished(tables_tasks(job, facts), "tables")
    _require_finished(pairs_tasks(job, facts), "pairs")


def _table_plans(job: Job, facts: Facts) -> tuple[list[TablePlan], list[TablePlan]]:
    assert job.config.dedup is not None
    runs, documents = np.array(facts["runs"], np.int64), np.array(facts["documents"], np.int64)
    each = np.repeat(-(-documents // np.maximum(runs, 1)), runs)
    return table_plans(job.config.dedup, runs=runs_of(job, facts), documents=each, directory=job.dedup)


def _reader(job: Job, facts: Facts) -> RunsReader:
    """A reader of all runs of the job, without the dropped duplicates."""
    described = read_marker(job.tokenizer)
    assert described is not None
    drops = job.duplicates if _has_document_dedup(job) else None
    return RunsReader(
        runs_of(job, facts), 0, drops, dtype_for(described["vocab_size"]).str, job.config.has_conversations
    )


def _merge_plan(job: Job, facts: Facts) -> MergePlan | None:
    tokens = int(np.array(facts["kept"], np.int64)[:, :, 1].sum())
    return plan_merges(_reader(job, facts), tokens, directory=job.merges)


T = TypeVar("T", bound=Task)


def _require_finished(tasks: Sequence[T], phase: str) -> Sequence[T]:
    """Returns the tasks of a phase, all of which must have finished.

    Raises:
        DataError: some tasks have not finished.
    """
    missing = [task.name for task in tasks if not task.finished]
    if missing:
        few = ", ".join(missing[:5])
        raise DataError(f"{len(missing)} of {len(tasks)} {phase} tasks have not finished: {few}\n  try: run them first")
    return tasks


def require_reduced(job: Job, facts: Facts) -> Sequence[ReduceTask]:
    """The tasks of the last phase, all of which must have finished.

    Raises:
        DataError: some tasks have not finished.
    """
    return _require_finished(reduce_tasks(job, facts), "reduce")
