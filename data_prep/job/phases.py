"""The phases of a job: lists of tasks; a phase starts when all tasks of the phase before have finished.

The tasks of a phase follow from the job directory: any process that sees it can run a share of any phase.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.config.corpus import CorpusConfig
from data_prep.executors.base import Executor
from data_prep.job import planning, saved_plans
from data_prep.job.directory import Job, job_identity
from data_prep.job.dropped_duplicates import write_duplicates_list
from data_prep.job.finish import finish, load_map_markers
from data_prep.job.planning import Facts
from data_prep.job.preflight import cleaning_identity, tokenizer_identity
from data_prep.job.progress import Display
from data_prep.task import Task, os_errors_as_data_errors, read_marker
from data_prep.tasks.map import MapTask
from data_prep.tasks.merge import MergeTask
from data_prep.tasks.reduce import ReduceTask
from data_prep.tasks.remove_lines import HashLinesTask
from foundation.directory import Manifest
from foundation.errors import ConfigError, DataError


@dataclass(frozen=True)
class Phase:
    """A phase of a job.

    Attributes:
        facts: function that reads the facts for making the tasks; raises DataError if an earlier phase has not
            finished.
        make: function that makes the tasks from the facts.
        writes: directory in the job into which the tasks write.
    """

    name: str
    description: str
    facts: Callable[[Job], Facts]
    make: Callable[[Job, Facts], Sequence[Task]]
    writes: str

    def tasks(self, job: Job) -> Sequence[Task]:
        """The phase's tasks, planned anew; raises DataError if an earlier phase has not finished."""
        return self.make(job, self.facts(job))


_LINES = Phase("lines", "hash lines", planning.lines_facts, planning.lines_tasks, "lines")
_REPEATED = Phase("repeated", "find repeated lines", planning.repeated_facts, planning.repeated_tasks, "dedup")
_MAP = Phase("map", "read, clean and tokenize", planning.map_facts, planning.map_tasks, "map")
_TABLES = Phase(
    "tables", "merge hash tables, in jobs of very many runs", planning.tables_facts, planning.tables_tasks, "dedup"
)
_PAIRS = Phase("pairs", "find documents that share hashes", planning.pairs_facts, planning.pairs_tasks, "dedup")
_COPIES = Phase(
    "copies", "decide which duplicates are dropped", planning.components_facts, planning.components_tasks, "dedup"
)
_MERGE = Phase("merge", "merge runs, in jobs of very many runs", planning.merge_facts, planning.merge_tasks, "merge")
_REDUCE = Phase("reduce", "sort and write shards", planning.reduce_facts, planning.reduce_tasks, "reduce")


def phases_of(config: CorpusConfig) -> list[Phase]:
    """The phases of a job, in order."""
    dedup = config.dedup
    lines = [_LINES, _REPEATED] if dedup is not None and dedup.lines is not None else []
    documents = [_TABLES, _PAIRS, _COPIES] if dedup is not None and (dedup.exact or dedup.near is not None) else []
    return [*lines, _MAP, *documents, _MERGE, _REDUCE]


def run_phases(job: Job, executor: Executor) -> list[Display]:
    """Runs the unfinished tasks of all phases. The caller must hold the job's exclusive lock."""
    return [run_phase(job, phase, executor)[1] for phase in phases_of(job.config)]


def run_phase(
    job: Job, phase: Phase, executor: Executor, *, share: tuple[int, int] | None = None
) -> tuple[int, Display]:
    """Runs the unfinished tasks of a phase, or of every `share[1]`-th task from number `share[0]` on.

    Args:
        share: (number, count) if other processes run the rest; all shares then use one plan (`saved_plans.py`).

    Returns:
        Number of tasks of the share, finished ones included, and the display with its counts.
    """
    first, shares = share or (0, 1)
    with os_errors_as_data_errors(phase.name):
        tasks = (phase.tasks(job) if share is None else shared_tasks(job, phase))[first::shares]
        todo = [task for task in tasks if not task.finished]
        if todo and share is not None:
            saved_plans.drop_plans(job, [later.name for later in _after(job, phase)])
    if len(todo) < len(tasks):
        print(f"{len(tasks) - len(todo)} of {len(tasks)} {phase.name} tasks were finished before", file=sys.stderr)
    note = job.root / "progress" / f"{phase.name}-{first:05d}.json"
    with _display(phase, tasks, todo, note) as display:
        for _ in executor.run(todo, report=display.add):
            pass
    return len(tasks), display


def run_share(config: CorpusConfig, name: str, executor: Executor, *, share: tuple[int, int]) -> tuple[int, Display]:
    """Runs a share of a phase for a batch scheduler that starts the other shares; see `run_phase`.

    Raises:
        ConfigError: there is no such phase.
        DataError: the job was not prepared, or was prepared with another config.
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
    facts = planning.reduce_facts(job)
    tasks, runs = planning.require_reduced(job, facts), planning.runs_of(job, facts)
    with os_errors_as_data_errors("finishing"):
        results = [(task.shard.split, task.run(planning.ignore_progress)) for task in tasks]
        write_duplicates_list(job, runs)
        return finish(job, markers=markers, results=results, runs=runs, tokenizer=tokenizer)


def commit_prepared_job(config: CorpusConfig) -> Manifest:
    """Calls `commit_output` for a job whose phases other processes have run."""
    job = load_prepared_job(config)
    with job.locked():
        return commit_output(job, tokenizer=tokenizer_identity(config))


def load_prepared_job(config: CorpusConfig) -> Job:
    """Loads the prepared job of a config.

    Raises:
        DataError: the job was not prepared, or was prepared with another config.
    """
    job = Job(config)
    saved = job.saved_identity()
    if saved is None or read_marker(job.tokenizer) is None:
        raise DataError(f"{job.root} has no prepared job\n  try: headrace prep prepare --config FILE")
    with os_errors_as_data_errors("reading the cleaning lists and the tokenizer"):
        tokenizer, cleaning = tokenizer_identity(config), cleaning_identity(config)
    job.check_identity(job_identity(config, listing=saved["inputs"], tokenizer=tokenizer, cleaning=cleaning), saved)
    return job


def shared_tasks(job: Job, phase: Phase) -> Sequence[Task]:
    """The tasks of a phase by the plan that all shares use; raises DataError if an earlier phase has not finished."""
    phases = phases_of(job.config)
    before = {earlier.writes for earlier in phases[: phases.index(phase)]} - {phase.writes}
    inputs = [job.root / name for name in sorted(before)]
    return phase.make(job, saved_plans.saved_facts(job, phase.name, phase.facts, inputs=inputs))


def _after(job: Job, phase: Phase) -> list[Phase]:
    phases = phases_of(job.config)
    return phases[phases.index(phase) + 1 :]


def _display(phase: Phase, tasks: Sequence[Task], todo: Sequence[Task], note: Path) -> Display:
    total, remaining = (
        sum(t.input_bytes for t in some if isinstance(t, MapTask | HashLinesTask)) for some in (tasks, todo)
    )
    tokens = sum(t.tokens for t in todo if isinstance(t, MergeTask | ReduceTask))
    return Display(phase.name, total_bytes=total, done_bytes=total - remaining, total_tokens=tokens, note=note)
