"""Preparation of a job: finds and checks the inputs, plans the map tasks, and makes the tokenizer."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from data_prep.config.corpus import CorpusConfig
from data_prep.executors.base import Executor
from data_prep.executors.local import LocalExecutor
from data_prep.job import uploads
from data_prep.job.changed_inputs import accept_restored, describe_changes, files_of, planned_files
from data_prep.job.directory import Job, job_identity
from data_prep.job.finish import is_finished
from data_prep.job.preflight import (
    check_documents,
    check_output,
    check_schemas,
    cleaning_identity,
    resolve_sources,
    tokenizer_identity,
)
from data_prep.job.progress import Display
from data_prep.job.saved_plans import drop_all_plans
from data_prep.sources import saved
from data_prep.sources.listing import ResolvedSource, listing_fingerprint, resolve
from data_prep.sources.units import Plan, group, units
from data_prep.task import os_errors_as_data_errors, read_marker
from data_prep.tasks.make_tokenizer import read_lines
from foundation.directory import free_bytes
from foundation.errors import DataError
from foundation.remote_publish import check_can_publish


@dataclass(frozen=True)
class InspectedJob:
    """A job whose config was checked against the files it names; nothing has been written yet.

    Attributes:
        sources: the files of each source; None for a builder, whose files do not exist yet.
        identity: identity of the job: format, config, and fingerprints of inputs, tokenizer and cleaning.
    """

    job: Job
    sources: list[ResolvedSource | None]
    identity: dict[str, Any]

    def plan_map_tasks(self) -> Plan:
        """Plans the map tasks of the inputs, without builders, whose files do not exist yet."""
        found = [source for source in self.sources if source is not None]
        return _group_into_tasks(found, self.job.config)


def inspect(config: CorpusConfig) -> InspectedJob:
    """Finds the inputs and runs the pre-flight checks.

    Raises:
        ConfigError, DataError: a pre-flight check fails, e.g. files, columns or a library are missing.
    """
    job = Job(config)
    with os_errors_as_data_errors("checking the inputs"):
        check_output(job.output)
        sources = resolve_sources(config, without=[job.output, job.root])
        found = [source for source in sources if source is not None]
        check_schemas(config, found)
        tokenizer, cleaning = tokenizer_identity(config), cleaning_identity(config)
        listing = listing_fingerprint(found)
    return InspectedJob(job, sources, job_identity(config, listing=listing, tokenizer=tokenizer, cleaning=cleaning))


def output_is_complete(inspected: InspectedJob) -> bool:
    """Whether the output exists; if it does, removes the job directory of a run that was killed after its commit.

    Raises:
        DataError: an output of this name was made differently.
    """
    job = inspected.job
    if not is_finished(job, inspected.identity, files=files_of(inspected.sources)):
        return False
    job.remove()
    if job.url is not None:
        uploads.release(job.url)  # the run was killed between the two
    return True


@contextmanager
def open_job(inspected: InspectedJob, executor: Executor | None = None) -> Iterator[Plan]:
    """Plans the job and makes its tokenizer, or resumes the job; yields the plan while holding the exclusive lock.

    Args:
        executor: executor of the job; a local one also runs the tokenizer task: its worker then has the tokenizer
            loaded.

    Raises:
        DataError: another process holds the lock, or the job directory belongs to another config or other inputs.
    """
    job = inspected.job
    if job.url is not None:
        check_can_publish(job.url)
        text = f"{job.url} is made in {job.output.parent}, which needs room for the job and a shard of each worker"
        print(f"{text}: {free_bytes(job.output) / 1e9:,.1f} GB are free", file=sys.stderr, flush=True)
    with os_errors_as_data_errors(f"making {job.root}"):
        job.root.mkdir(parents=True, exist_ok=True)
    with job.locked():
        saved = _identity_to_resume(inspected)
        if saved is None:
            job.clear()
        if job.url is not None:
            uploads.claim(job, inspected.identity)
            uploads.forget_lost(job)
        job.remove_scratch()
        drop_all_plans(job)
        plan = _resumed_plan(inspected) if saved is not None else _plan(inspected)
        task = job.tokenizer_task(plan)
        if not task.finished:
            print(f"tokenizer: {_tokenizer_action(job.config)}", file=sys.stderr, flush=True)
            with (
                Display("tokenizer", note=job.root / "progress" / "tokenizer-00000.json") as display,
                _local_executor(executor) as local,
            ):
                list(local.run([task], report=display.add))
            for line in read_lines(job.tokenizer):
                print(f"tokenizer: {line}", file=sys.stderr, flush=True)
        if (warning := _vocabulary_warning(job)) is not None:
            print(warning, file=sys.stderr, flush=True)
        yield plan


def _identity_to_resume(inspected: InspectedJob) -> dict[str, Any] | None:
    """The identity of the unfinished job; None without a job, and for a different job that has finished nothing.

    A mistyped field leaves such a job behind: nothing is lost when the corrected command plans anew.

    Raises:
        DataError: the unfinished job has other settings or inputs, and results.
    """
    job = inspected.job
    saved = job.saved_identity()
    if saved is None:
        return None
    try:
        job.check_identity(inspected.identity, saved, changes=_changes(inspected, saved))
    except DataError:
        if read_marker(job.tokenizer) is not None:  # the first result of every job
            raise
        return None
    return saved


def _vocabulary_warning(job: Job) -> str | None:
    """A warning if the training text had too few different words for the requested vocabulary, or None."""
    section, described = job.config.tokenizer, read_marker(job.tokenizer)
    if section.train is None or described is None or described["vocab_size"] >= section.vocab_size:
        return None
    return (
        f"warning: the tokenizer has {described['vocab_size']:,} ids, and tokenizer.vocab_size asks for "
        f"{section.vocab_size:,}: its training text has no more\n  try: more text, a larger tokenizer.sample_bytes "
        f"({section.sample_bytes:,} now), or a smaller vocab_size"
    )


def _changes(inspected: InspectedJob, saved: dict[str, Any]) -> str:
    if saved["inputs"] == inspected.identity["inputs"]:
        return ""
    builders = {source.label for source in inspected.job.config.sources if source.builder}
    before = {key: size for key, size in planned_files(inspected.job.load_plan()).items() if key[0] not in builders}
    return describe_changes(before, files_of(inspected.sources))


def _resumed_plan(inspected: InspectedJob) -> Plan:
    with os_errors_as_data_errors("checking the inputs"):
        return accept_restored(inspected.job, inspected.job.load_plan(), inspected.sources)


@contextmanager
def _local_executor(executor: Executor | None) -> Iterator[LocalExecutor]:
    """Yields the given executor if it is local, or else a new one."""
    if isinstance(executor, LocalExecutor):
        yield executor
    else:
        with LocalExecutor(1) as new:
            yield new


def _plan(inspected: InspectedJob) -> Plan:
    job, config = inspected.job, inspected.job.config
    try:
        with os_errors_as_data_errors("checking the inputs"):
            found = [source or _build(job, i) for i, source in enumerate(inspected.sources)]
            for line in check_schemas(config, found):
                print(line, file=sys.stderr, flush=True)
            plan = _group_into_tasks(found, config)
            check_documents((unit for task in plan for unit in task), config)
    except BaseException:
        if not (job.root / "datasets").exists():
            shutil.rmtree(job.root)
        raise
    with os_errors_as_data_errors("writing the plan"):
        job.save_plan(plan, inspected.identity)
    return plan


def _group_into_tasks(sources: list[ResolvedSource], config: CorpusConfig) -> Plan:
    """Makes the plan, `seen` sources first: the first of equal lines counts, and `seen` lines are not written."""
    seen = {source.label for source in config.sources if source.seen}
    ordered = sorted(sources, key=lambda source: source.label not in seen)
    return group(units(ordered, task_bytes=config.task_bytes), task_bytes=config.task_bytes)


def _build(job: Job, index: int) -> ResolvedSource:
    source, at = job.config.sources[index], f"sources.{index}"
    target = job.dataset(source)
    target.parent.mkdir(exist_ok=True)
    saved.materialize(source, target, at=at)
    built = source.model_copy(update={"path": str(target), "builder": None, "split": None, "name": source.label})
    return resolve(built, at=at)


def _tokenizer_action(config: CorpusConfig) -> str:
    section = config.tokenizer
    if section.path is not None:
        return f"using {section.path}"
    return f"training {section.train} on up to {section.sample_bytes / 1e6:,.1f} MB"
