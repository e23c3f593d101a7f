"""The phases of a job: lists of tasks, each of which begins when all tasks of the one before have finished.

What a phase consists of is read from the job directory, so any process that sees it can run a share of any phase.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.config import CorpusConfig
from data_prep.executors.base import Executor
from data_prep.finish import checked_markers, finish
from data_prep.job import Job
from data_prep.progress import Display
from data_prep.runs import runs_of
from data_prep.shards import plan_shards
from data_prep.survey import tokenizer_identity
from data_prep.tasks.base import Task, plain_errors
from data_prep.tasks.map import MapTask, counts_of
from data_prep.tasks.reduce import ReduceTask
from data_prep.tasks.tokenizer import read_description
from data_prep.tokenfile import dtype_for
from headrace.directory import Manifest
from headrace.errors import ConfigError, DataError


@dataclass(frozen=True)
class Phase:
    """One step of a job. tasks: makes its list; raises DataError where the phase before has not finished."""

    name: str
    words: str
    tasks: Callable[[Job], Sequence[Task]]


def phases_of(_config: CorpusConfig) -> list[Phase]:
    """The phases of a job, in order."""
    return [
        Phase("map", "read, clean and tokenise", map_tasks),
        Phase("reduce", "order, merge and write shards", reduce_tasks),
    ]


def run_phases(job: Job, executor: Executor) -> list[Display]:
    """Runs what is left of all phases. The caller holds the job alone."""
    return [run_phase(job, phase, executor) for phase in phases_of(job.config)]


def run_phase(job: Job, phase: Phase, executor: Executor, *, share: tuple[int, int] = (0, 1)) -> Display:
    """Runs what is left of a phase, or of every `share[1]`-th task of it from number `share[0]` on.

    Returns:
        what was counted.
    """
    with plain_errors(phase.name):
        tasks = phase.tasks(job)[share[0] :: share[1]]
        todo = [task for task in tasks if not task.finished]
    if len(todo) < len(tasks):
        print(f"{len(tasks) - len(todo)} of {len(tasks)} {phase.name} tasks were finished before", file=sys.stderr)
    note = job.root / "progress" / f"{phase.name}-{share[0]:05d}.json"
    with _display(phase, tasks, todo, note) as display:
        for _ in executor.run(todo, report=display.add):
            pass
    return display


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
        display = run_phase(job, named[name], executor, share=share)
    return len(named[name].tasks(job)[share[0] :: share[1]]), display


def complete(job: Job, *, tokenizer: str | None) -> Manifest:
    """Commits the output when all phases have finished. The caller holds the job alone.

    Args:
        tokenizer: fingerprint of the given tokenizer's files.

    Raises:
        DataError: something has not finished.
    """
    markers = checked_markers(job)
    tasks = reduce_tasks(job)
    missing = [task.name for task in tasks if not task.finished]
    if missing:
        few = ", ".join(missing[:5])
        raise DataError(f"{len(missing)} of {len(tasks)} reduce tasks have not finished: {few}\n  try: run them first")
    with plain_errors("finishing"):
        results = [(task.shard.split, task.run(lambda _counts: None)) for task in tasks]
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
    if saved is None or read_description(job.tokenizer) is None:
        raise DataError(f"{job.root} holds no prepared job\n  try: python -m data_prep prepare --config FILE")
    job.check_same({"config": job.config.identity()}, saved)
    return job


def map_tasks(job: Job) -> list[MapTask]:
    """One for each entry of the plan."""
    return job.map_tasks(job.load_plan())


def reduce_tasks(job: Job) -> list[ReduceTask]:
    """One for each shard."""
    markers = checked_markers(job)
    described = read_description(job.tokenizer)
    assert described is not None
    runs = [run for i in range(len(markers)) for run in runs_of(job.map_directory(i))]
    counts = counts_of(markers)
    shards = plan_shards(counts[:, :, 1], counts[:, :, 0], runs, shard_tokens=job.config.shard_tokens)
    dtype = dtype_for(described["vocab_size"]).str
    return [
        ReduceTask(
            shard, runs, (), dtype, job.config.has_conversations, job.out, job.reduce_marker(shard.split, shard.index)
        )
        for shard in shards
    ]


def _display(phase: Phase, tasks: Sequence[Task], todo: Sequence[Task], note: Path) -> Display:
    total, left = (sum(t.input_bytes for t in some if isinstance(t, MapTask)) for some in (tasks, todo))
    tokens = sum(t.shard.tokens for t in todo if isinstance(t, ReduceTask))
    return Display(phase.name, total_bytes=total, done_bytes=total - left, total_tokens=tokens, note=note)
