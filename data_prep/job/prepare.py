"""Before the first task: the inputs are found and checked, the map tasks planned, the tokenizer made."""

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
from data_prep.job.directory import Job, identity_of
from data_prep.job.finish import is_finished
from data_prep.job.progress import Display
from data_prep.job.survey import check_cleaning, check_documents, check_tables, resolve_all, tokenizer_identity
from data_prep.sources import saved
from data_prep.sources.listing import ResolvedSource, listing_fingerprint, resolve
from data_prep.sources.units import Plan, group, units
from data_prep.task import os_errors_as_data_errors


@dataclass(frozen=True)
class InspectedJob:
    """A config that was held against the files it names; nothing has been written."""

    job: Job
    sources: list[ResolvedSource | None]
    identity: dict[str, Any]

    def planned(self) -> Plan:
        """The map tasks that the inputs would be cut into; without those of builders, which are not there yet."""
        found = [source for source in self.sources if source is not None]
        return _cut(found, self.job.config)


def inspect(config: CorpusConfig) -> InspectedJob:
    """Finds the inputs and refuses what cannot work.

    Raises:
        ConfigError, DataError: see `survey`.
    """
    job = Job(config)
    with os_errors_as_data_errors("looking at the inputs"):
        sources = resolve_all(config, without=[job.output, job.root])
        found = [source for source in sources if source is not None]
        check_tables(config, found)
        tokenizer, cleaning = tokenizer_identity(config), check_cleaning(config)
        listing = listing_fingerprint(found)
    return InspectedJob(job, sources, identity_of(config, listing=listing, tokenizer=tokenizer, cleaning=cleaning))


def already_there(inspected: InspectedJob) -> bool:
    """Whether there is nothing to do; a job directory left by a run that was killed after its commit is removed.

    Raises:
        DataError: something else is under the output's name.
    """
    job = inspected.job
    if not is_finished(job, inspected.identity):
        return False
    job.remove()
    return True


@contextmanager
def opened(inspected: InspectedJob, executor: Executor | None = None) -> Iterator[Plan]:
    """Holds the job directory alone, planned and with its tokenizer; gives the plan.

    Args:
        executor: a local one runs the tokenizer's task, so that its worker has the tokenizer for the next tasks.

    Raises:
        DataError: another process holds it, or it belongs to another config or other inputs.
    """
    job = inspected.job
    with os_errors_as_data_errors(f"making {job.root}"):
        job.root.mkdir(parents=True, exist_ok=True)
    with job.locked():
        saved = job.saved_identity()
        if saved is not None:
            job.check_same(inspected.identity, saved)
        else:
            job.clear()
        job.remove_scratch()
        plan = job.load_plan() if saved is not None else _plan(inspected)
        task = job.tokenizer_task(plan)
        if not task.finished:
            print(f"tokenizer: {_how(job.config)}", file=sys.stderr, flush=True)
            with (
                Display("tokenizer", note=job.root / "progress" / "tokenizer-00000.json") as display,
                _here(executor) as local,
            ):
                list(local.run([task], report=display.add))
        yield plan


@contextmanager
def _here(executor: Executor | None) -> Iterator[LocalExecutor]:
    """A local executor: the given one, or one of our own."""
    if isinstance(executor, LocalExecutor):
        yield executor
    else:
        with LocalExecutor(1) as own:
            yield own


def _plan(inspected: InspectedJob) -> Plan:
    job, config = inspected.job, inspected.job.config
    try:
        with os_errors_as_data_errors("looking at the inputs"):
            found = [source or _build(job, i) for i, source in enumerate(inspected.sources)]
            check_tables(config, found)
            plan = _cut(found, config)
            check_documents((unit for task in plan for unit in task), config)
    except BaseException:
        if not (job.root / "datasets").exists():
            shutil.rmtree(job.root)
        raise
    with os_errors_as_data_errors("writing the plan"):
        job.save_plan(plan, inspected.identity)
    return plan


def _cut(sources: list[ResolvedSource], config: CorpusConfig) -> Plan:
    return group(units(sources, task_bytes=config.task_bytes), task_bytes=config.task_bytes)


def _build(job: Job, index: int) -> ResolvedSource:
    source, at = job.config.sources[index], f"sources.{index}"
    target = job.dataset(source)
    target.parent.mkdir(exist_ok=True)
    saved.materialise(source, target, at=at)
    built = source.model_copy(update={"path": str(target), "builder": None, "split": None, "name": source.label})
    return resolve(built, at=at)


def _how(config: CorpusConfig) -> str:
    section = config.tokenizer
    if section.path is not None:
        return f"taking {section.path}"
    return f"training {section.train} on up to {section.sample_bytes / 1e6:,.1f} MB"
