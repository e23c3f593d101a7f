"""The stages of a job: prepare, map, reduce. The same functions serve one machine and a batch scheduler."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from data_prep import local
from data_prep.config import CorpusConfig
from data_prep.finish import checked_markers, finish, is_finished
from data_prep.inputs import ResolvedSource, listing_fingerprint, resolve
from data_prep.job import Job, identity_of
from data_prep.plan import Unit, group, units
from data_prep.progress import Display
from data_prep.readers import hf
from data_prep.runs import runs_of
from data_prep.shards import plan_shards
from data_prep.survey import check_documents, check_tables, resolve_all, tokenizer_identity
from data_prep.tasks.base import plain_errors
from data_prep.tasks.map import MapTask, counts_of, read_marker
from data_prep.tasks.reduce import ReduceTask
from data_prep.tasks.tokenizer import read_description
from data_prep.tokenfile import SPLITS, dtype_for
from headrace.directory import Manifest
from headrace.errors import DataError

Plan = list[list[Unit]]


@dataclass(frozen=True)
class Inspected:
    """A config that was held against the files it names; nothing has been written."""

    job: Job
    sources: list[ResolvedSource | None]
    identity: dict[str, Any]


def inspect(config: CorpusConfig) -> Inspected:
    """Finds the inputs and refuses what cannot work.

    Raises:
        ConfigError, DataError: see `survey`.
    """
    job = Job(config)
    sources = resolve_all(config, without=[job.output, job.root])
    found = [source for source in sources if source is not None]
    check_tables(config, found)
    tokenizer = tokenizer_identity(config)
    return Inspected(job, sources, identity_of(config, listing=listing_fingerprint(found), tokenizer=tokenizer))


@contextmanager
def opened(inspected: Inspected) -> Iterator[Plan]:
    """Holds the job directory alone, planned and with its tokenizer; gives the plan.

    Raises:
        DataError: another process holds it, or it belongs to another config or other inputs.
    """
    job = inspected.job
    with plain_errors(f"making {job.root}"):
        job.root.mkdir(parents=True, exist_ok=True)
    with job.locked():
        saved = job.saved_identity()
        if saved is not None:
            job.check_same(inspected.identity, saved)
        job.remove_scratch()
        plan = job.load_plan() if saved is not None else _plan(inspected)
        if read_description(job.tokenizer) is None:
            _say(f"tokenizer: {_how(inspected.job.config)}")
            _run_all([job.tokenizer_task(plan)], workers=1, display=Display("tokenizer", total_bytes=0))
        yield plan


def run_maps(tasks: Sequence[MapTask], *, workers: int) -> Display:
    """Runs the map tasks that have not finished; returns what was counted."""
    todo = [task for task in tasks if read_marker(task.directory) is None]
    total, left = _bytes(tasks), _bytes(todo)
    if len(todo) < len(tasks):
        _say(f"{len(tasks) - len(todo)} of {len(tasks)} map tasks were finished before")
    display = Display("map", total_bytes=total, done_bytes=total - left)
    _run_all(todo, workers=workers, display=display)
    return display


def map_share(config: CorpusConfig, *, task: int, of: int, workers: int) -> tuple[int, Display]:
    """Runs every map task t with t % of == task; returns how many these are, and what was counted.

    Raises:
        DataError: the job was not prepared, or with another config.
    """
    job = Job(config)
    plan = _prepared(job)
    with job.locked(shared=True):
        share = job.map_tasks(plan)[task::of]
        return len(share), run_maps(share, workers=workers)


def reduce(job: Job, plan: Plan, *, workers: int, tokenizer: str | None) -> Manifest:
    """Writes the shards and commits the output. The caller holds the job alone.

    Raises:
        DataError: see `finish.checked_markers`.
    """
    markers = checked_markers(job, tasks=len(plan))
    with plain_errors("reduce"):
        tasks = _reduce_tasks(job, markers)
        total = sum(task.shard.tokens for task in tasks)
        done = _run_all(tasks, workers=workers, display=Display("reduce", total_tokens=total))
        shards = {s: [done[t.name] for t in tasks if t.shard.split == s] for s in SPLITS}
        return finish(job, markers=markers, shards=shards, tokenizer=tokenizer)


def reduce_prepared(config: CorpusConfig, *, workers: int) -> Manifest:
    """`reduce` for a job whose maps were run by somebody else.

    Raises:
        DataError: the job was not prepared, or with another config, or its maps are not finished.
    """
    job = Job(config)
    plan = _prepared(job)
    with job.locked():
        job.remove_scratch()
        return reduce(job, plan, workers=workers, tokenizer=tokenizer_identity(config))


def already_there(inspected: Inspected) -> bool:
    """Whether there is nothing to do; a job directory left by a run that was killed after its commit is removed.

    Raises:
        DataError: something else is under the output's name.
    """
    job = inspected.job
    if not is_finished(job, inspected.identity):
        return False
    shutil.rmtree(job.root, ignore_errors=True)
    return True


def _plan(inspected: Inspected) -> Plan:
    job, config = inspected.job, inspected.job.config
    try:
        found = [source or _build(job, i) for i, source in enumerate(inspected.sources)]
        check_tables(config, found)
        plan = group(units(found, task_bytes=config.task_bytes), task_bytes=config.task_bytes)
        check_documents((unit for task in plan for unit in task), config)
    except BaseException:
        if not (job.root / "datasets").exists():
            shutil.rmtree(job.root)
        raise
    with plain_errors("writing the plan"):
        job.save_plan(plan, inspected.identity)
    return plan


def _build(job: Job, index: int) -> ResolvedSource:
    source, target, at = job.config.sources[index], job.dataset(index), f"sources.{index}"
    target.parent.mkdir(exist_ok=True)
    hf.materialise(source, target, at=at)
    saved = source.model_copy(update={"path": str(target), "builder": None, "split": None, "name": source.label})
    return resolve(saved, at=at)


def _prepared(job: Job) -> Plan:
    saved = job.saved_identity()
    if saved is None or read_description(job.tokenizer) is None:
        raise DataError(f"{job.root} holds no prepared job\n  try: python -m data_prep prepare --config FILE")
    job.check_same({"config": job.config.identity()}, saved)
    return job.load_plan()


def _reduce_tasks(job: Job, markers: list[dict[str, Any]]) -> list[ReduceTask]:
    described = read_description(job.tokenizer)
    assert described is not None
    runs = [run for i in range(len(markers)) for run in runs_of(job.map_directory(i))]
    counts = counts_of(markers)
    shards = plan_shards(counts[:, :, 1], counts[:, :, 0], runs, shard_tokens=job.config.shard_tokens)
    dtype = dtype_for(described["vocab_size"]).str
    return [
        ReduceTask(shard, runs, (), dtype, job.out, job.reduce_marker(shard.split, shard.index)) for shard in shards
    ]


def _run_all(tasks: Sequence[Any], *, workers: int, display: Display) -> dict[str, dict[str, Any]]:
    with display:
        return {task.name: result for task, result in local.run(tasks, workers=workers, report=display.add)}


def _how(config: CorpusConfig) -> str:
    section = config.tokenizer
    if section.path is not None:
        return f"taking {section.path}"
    return f"training {section.train} on up to {section.sample_bytes / 1e6:,.1f} MB"


def _bytes(tasks: Sequence[MapTask]) -> int:
    return sum(unit.end - unit.start for task in tasks for unit in task.units)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
