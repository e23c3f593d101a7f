"""One of N shares of a whole job, for schedulers that start N equal processes, each with a number.

Kubernetes' indexed Jobs do so, or a loop over hosts. Each process runs its share of every phase, and waits for the
other processes before the next phase:

    share 0:     prepare, map[0::N], ..., reduce[0::N], commit
    share i > 0:          map[i::N], ..., reduce[i::N]

A killed share is started again with the same number, on any host: finished tasks are skipped. All shares have to run at
the same time. They communicate only through the job directory.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from data_prep.config.corpus import CorpusConfig
from data_prep.executors.base import Executor
from data_prep.job import phases, prepare
from data_prep.job.directory import Job
from data_prep.task import Task, read_marker
from foundation.directory import Manifest
from foundation.errors import DataError
from foundation.lock import LockedError

_POLL_S = 0.5
_TELL_S = 60.0
T = TypeVar("T")


def run_whole_share(config: CorpusConfig, executor: Executor, *, share: tuple[int, int]) -> Manifest | None:
    """Runs share `share[0]` of `share[1]` of every phase; share 0 first prepares the job and finally commits it.

    Returns:
        The output's manifest, for share 0; None for other shares, and if the output was complete before.

    Raises:
        ConfigError, DataError: a pre-flight check or a task fails, or the job belongs to another config.
    """
    job = Job(config)
    if share[0] == 0 and not _prepared(config):
        return None
    if share[0] > 0 and not _prepared_by_share_0(config, job):
        return None
    for phase in phases.phases_of(config):
        done = _when_unlocked(job, partial(phases.run_share, config, phase.name, executor, share=share))
        if done is None or not _others_finished(job, phase):
            return None
    return _when_unlocked(job, lambda: phases.commit_prepared_job(config)) if share[0] == 0 else None


def _prepared(config: CorpusConfig) -> bool:
    """Prepares the job or resumes it; returns False when its output is complete.

    If this share was started again, other shares may be working on the job: it is then already prepared.
    """
    inspected = prepare.inspect(config)
    while not prepare.output_is_complete(inspected):
        try:
            with prepare.open_job(inspected):
                return True
        except LockedError:
            if inspected.job.saved_identity() == inspected.identity and _has_tokenizer(inspected.job):
                return True
        time.sleep(_POLL_S)
    return False


def _prepared_by_share_0(config: CorpusConfig, job: Job) -> bool:
    """Waits until share 0 has prepared the job; returns False when its output is complete."""
    waiting = _PauseReporter("share 0 to prepare the job: is it running?")
    while not (job.root.is_dir() and job.saved_identity() is not None and _has_tokenizer(job)):
        if job.has_output and not job.root.exists():
            return not prepare.output_is_complete(prepare.inspect(config))
        waiting.pause()
    return True


def _has_tokenizer(job: Job) -> bool:
    return read_marker(job.tokenizer) is not None


def _when_unlocked(job: Job, work: Callable[[], T]) -> T | None:
    """Runs `work` when no other share holds a lock that it needs; returns None if the job was committed meanwhile."""
    waiting = _PauseReporter("the lock of the job, which another share holds")
    while True:
        try:
            return work()
        except LockedError:
            waiting.pause()
        except (DataError, OSError):
            if job.root.exists() or not job.has_output:
                raise
            return None


def _others_finished(job: Job, phase: phases.Phase) -> bool:
    """Waits for the tasks of the other shares; returns False when the job has been committed meanwhile."""
    found = _when_unlocked(job, lambda: phases.shared_tasks(job, phase))
    left = deque[Task](found or [])
    waiting = _PauseReporter(f"{phase.name} tasks of other shares")
    while _drop_finished(left):
        if not job.root.exists():
            if job.has_output:
                return False
            raise DataError(f"{job.root} has been removed\n  try: run all shares again")
        waiting.pause(f"up to {len(left)} ")
    return found is not None


def _drop_finished(tasks: deque[Task]) -> bool:
    """Drops the tasks before the first unfinished one; returns whether any task is left.

    All tasks have to finish: it is enough to check one task at a time. Checking 10,000 would be 20,000 reads a second.
    """
    while tasks and tasks[0].finished:
        tasks.popleft()
    return bool(tasks)


class _PauseReporter:
    """Pauses, and prints the reason once a minute."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = time.monotonic()

    def pause(self, count: str = "") -> None:
        if time.monotonic() - self._told >= _TELL_S:
            self._told = time.monotonic()
            print(f"waiting for {count}{self._what}", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
