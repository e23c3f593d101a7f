"""Reads the progress of a run from its directory, and from Slurm where there is one. No torch; disturbs nothing.

It reads the manifest, metrics, journal of attempts, faults, checkpoints, lock, and the agents' files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from foundation.directory import MANIFEST, check_sizes, read_manifest
from foundation.errors import DataError
from foundation.foreign_json import read_json
from foundation.remote_run import UPLOADS, pull, url_of
from foundation.storage import StorageError
from pipeline.checkpoint.format.naming import finished_checkpoints
from pipeline.cluster.status.agents import FOLDER as AGENTS
from pipeline.cluster.status.agents import Agents, read_agents
from pipeline.cluster.status.find import not_begun
from pipeline.cluster.status.slurm import QueuedJob, find_jobs
from pipeline.runtime.faults.report import read_faults
from pipeline.runtime.goodput.account import Goodput, goodput_of, submission_time
from pipeline.runtime.goodput.attempts import RecordedAttempt, read_attempts
from pipeline.runtime.goodput.metrics import Metrics, MetricsReader, seconds_left
from pipeline.runtime.launch.run_lock import is_training
from pipeline.runtime.metrics.attempts_journal import NAME as ATTEMPTS
from pipeline.runtime.metrics.journal import NAME as JOURNAL
from pipeline.runtime.metrics.sinks import JournalRow
from pipeline.runtime.metrics.times import seconds_of

SLURM_STARTS = ".agents/starts"
_PULL_S = 10.0
"""Seconds between two looks into an object store."""


@dataclass(frozen=True)
class CheckpointStatus:
    """The newest finished checkpoint.

    Attributes:
        path: directory of the checkpoint.
        step: step after which it was written.
        age_seconds: seconds since it was written.
        damage: first problem found from the sizes of its files; None where the checkpoint is complete.
    """

    path: Path
    step: int
    age_seconds: float
    damage: str | None


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run.

    Attributes:
        dir: the run's directory.
        steps: number of steps of the whole run; None where the manifest does not give it.
        step: newest step in its metrics; 0 before the first.
        loss: loss of the newest step, in nats per token; None before the first.
        tokens_per_second: tokens per second in the newest step, over all ranks; None before the first.
        mfu: model FLOPs utilization of the newest step, a fraction; None where the device's peak is not known.
        heldout_loss: held-out loss of the newest evaluation, in nats per token; None before the first.
        tasks: task -> its newest figures, with their step.
        shares: samples per step of each data-parallel rank, as balanced last; empty where they are fixed.
        newest: the newest finished checkpoint.
        training: whether a process trains the run now; None if the file system has no locks.
        idle_seconds: seconds since the metrics were last written; None where there are none.
        seconds_left: estimated seconds to the end; None while nothing trains, or before there is an estimate.
        goodput: goodput until now (`pipeline.runtime.goodput.account`); None before the first step.
        attempts: starts of the run, oldest first.
        agents: newest plan of the agents; None without agents.
        jobs: Slurm jobs of the run, as far as Slurm knows them.
        faults: lost and failed ranks, rollbacks and failed checkpoints, oldest first.
        damaged_lines: number of damaged lines in the journals, which were skipped.
        exchange: the newest exchange with other islands; None in an ordinary run.
        uploads: newest report of the process that uploads; None for a run on a file system.
    """

    dir: Path
    steps: int | None
    step: int
    loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    heldout_loss: float | None
    shares: tuple[int, ...]
    newest: CheckpointStatus | None
    training: bool | None
    idle_seconds: float | None
    seconds_left: float | None
    goodput: Goodput | None
    attempts: tuple[RecordedAttempt, ...]
    agents: Agents | None
    jobs: tuple[QueuedJob, ...]
    faults: tuple[JournalRow, ...]
    damaged_lines: int
    exchange: JournalRow | None = None
    tasks: dict[str, JournalRow] = field(default_factory=dict)
    uploads: Uploading | None = None

    @property
    def finished(self) -> bool:
        """Tells whether the run's last step is done."""
        return self.steps is not None and self.step >= self.steps

    @property
    def checkpoint(self) -> Path | None:
        """The newest finished checkpoint."""
        return None if self.newest is None else self.newest.path

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return None if self.newest is None else self.newest.step

    def plain(self) -> dict[str, Any]:
        """Converts the status to a JSON object."""
        found: dict[str, Any] = plain(self)
        derived = {name: getattr(self, name) for name in ("finished", "checkpoint_step")}
        if self.goodput is not None:
            found["goodput"] = {**self.goodput.row(), "attempts": found["goodput"]["attempts"]}
        path = None if self.checkpoint is None else str(self.checkpoint)
        return {**found, **derived, "checkpoint": path}


@dataclass(frozen=True)
class Uploading:
    """Uploads of a run to an object store.

    Attributes:
        url: URL of the run in the object store.
        host: host that wrote there last.
        released: whether the process that uploads has ended with its last files uploaded.
        age_seconds: seconds since the process wrote this report, by the clocks of both hosts.
        silent_seconds: seconds without a renewal after which the process counts as ended.
        durable_step: step of the newest checkpoint in the object store; None without one.
        durable_age_seconds: seconds since that checkpoint was uploaded; None where an earlier start of the run uploaded
            it.
        waiting: steps of the checkpoints still to upload, including the one in progress.
        backlog_bytes: bytes left to upload.
        bytes_per_second: bytes sent per second, over the last 30 s.
        error: current error of the uploads; None without one.
    """

    url: str
    host: str
    released: bool
    age_seconds: float
    silent_seconds: float
    durable_step: int | None
    durable_age_seconds: float | None
    waiting: tuple[int, ...]
    backlog_bytes: int
    bytes_per_second: float
    error: str | None

    @property
    def lives(self) -> bool:
        """Tells whether the uploading host has renewed its lease lately."""
        return not self.released and self.age_seconds < self.silent_seconds


class RunReader:
    """Reads the status of one run repeatedly; reads only new rows of its metrics.

    Args:
        run_dir: the run's directory.
        slurm: whether to ask Slurm for its jobs.
        jobs: jobs of the run that have not started yet.
    """

    def __init__(self, run_dir: Path, *, slurm: bool = True, jobs: Sequence[str] = ()) -> None:
        self._dir, self._slurm, self._jobs = run_dir, slurm, tuple(jobs)
        self._metrics, self._pulled = MetricsReader(run_dir), -_PULL_S

    def read(self) -> RunStatus:
        """Reads the present status.

        Raises:
            DataError: no run has begun in the directory, or its manifest is damaged.
        """
        run_dir, now = self._dir, time.time()
        if (url := url_of(run_dir)) is not None and time.monotonic() - self._pulled > _PULL_S:
            with suppress(StorageError):  # the last copy is shown, with its age
                pull(url)
            self._pulled = time.monotonic()
        if not has_begun(run_dir) and not self._jobs:
            raise not_begun(run_dir)
        (steps, tokens), metrics, training = _length(run_dir), self._metrics.read(), is_training(run_dir)
        uploads = _uploads(run_dir, now)
        if uploads is not None and not training:  # nothing trains here, but the run may train on another host
            training = uploads.lives
        last = {"last_step": metrics.step["step"], "last_time": metrics.last_time}
        attempts, damaged = read_attempts(run_dir, training=training, **last)
        jobs = find_jobs(self._job_ids(attempts)) if self._slurm else []
        faults = [*metrics.events, *read_faults(run_dir)]
        return RunStatus(
            dir=run_dir,
            steps=steps,
            step=metrics.step["step"],
            loss=metrics.step.get("loss"),
            tokens_per_second=metrics.step.get("tokens_per_second"),
            mfu=metrics.step.get("mfu"),
            heldout_loss=metrics.evaluation.get("loss"),
            shares=tuple(metrics.shares.get("samples", ())),
            newest=_newest(run_dir, metrics, now),
            training=training,
            idle_seconds=_idle(run_dir, now) if uploads is None else max(0.0, now - (metrics.last_time or now)),
            seconds_left=seconds_left(metrics, steps=steps, tokens=tokens) if training is not False else None,
            goodput=goodput_of(metrics, attempts, now=now, submitted=submission_time(run_dir)),
            attempts=tuple(attempts),
            agents=read_agents(run_dir),
            jobs=tuple(jobs),
            faults=tuple(sorted(faults, key=lambda row: int(row.get("step", 0)))),
            damaged_lines=damaged + metrics.damaged,
            exchange=metrics.exchange,
            tasks=metrics.tasks,
            uploads=uploads,
        )

    def _job_ids(self, attempts: Sequence[RecordedAttempt]) -> list[str]:
        """Lists the newest job that started here, the newest that Slurm started, and jobs that will train here."""
        started = [attempt.job for attempt in attempts if attempt.job][-1:]
        starts = self._dir / SLURM_STARTS
        noted = [line.split()[0] for line in starts.read_text().splitlines() if line.strip()] if starts.exists() else []
        return list(dict.fromkeys([*started, *noted[-1:], *self._jobs]))


def read_status(run_dir: Path) -> RunStatus:
    """Reads the status of a run once, without asking Slurm.

    Raises:
        DataError: no run has begun in the directory, or its manifest is damaged.
    """
    return RunReader(run_dir, slurm=False).read()


def has_begun(run_dir: Path) -> bool:
    """Tells whether a directory has any of the files that a run writes."""
    return any((run_dir / name).exists() for name in (JOURNAL, MANIFEST, ATTEMPTS, SLURM_STARTS, AGENTS))


def plain(value: Any) -> Any:
    """Converts dataclasses, paths and tuples to JSON values."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _uploads(run_dir: Path, now: float) -> Uploading | None:
    url = url_of(run_dir)
    try:
        found = read_json(run_dir / UPLOADS) if url is not None else None
    except (OSError, DataError):
        return None
    if url is None or found is None:
        return None
    told = found["status"]
    durable = seconds_of(told.get("durable_at"))
    in_progress = [told["uploading"]] if told.get("uploading") else []
    return Uploading(
        url=url,
        host=found["host"],
        released=found["released"],
        age_seconds=max(0.0, now - (seconds_of(told.get("time")) or now)),
        silent_seconds=found["silent_s"],
        durable_step=told.get("durable_step"),
        durable_age_seconds=None if durable is None else max(0.0, now - durable),
        waiting=(*in_progress, *told.get("waiting", ())),
        backlog_bytes=told.get("backlog_bytes", 0),
        bytes_per_second=told.get("bytes_per_second", 0.0),
        error=told.get("error"),
    )


def _idle(run_dir: Path, now: float) -> float | None:
    journal = run_dir / JOURNAL
    return max(0.0, now - journal.stat().st_mtime) if journal.exists() else None


def _length(run_dir: Path) -> tuple[int | None, int | None]:
    """Returns steps and tokens of the whole run; None where unknown, for tokens also where all steps are alike."""
    if not (run_dir / MANIFEST).exists():
        return None, None
    details = read_manifest(run_dir, kind="run").details
    ledger = details.get("ledger")
    return details.get("steps"), sum(row["tokens"] for row in ledger) if ledger else None


def _newest(run_dir: Path, metrics: Metrics, now: float) -> CheckpointStatus | None:
    step, path = next(iter(finished_checkpoints(run_dir)), (None, None))
    if step is None or path is None:
        return None
    written = metrics.checkpoints.get(step) or path.stat().st_mtime
    return CheckpointStatus(path, step, max(0.0, now - written), _damage(path))


def _damage(path: Path) -> str | None:
    try:
        check_sizes(path, read_manifest(path, kind="checkpoint"))
    except DataError as error:
        return str(error).splitlines()[0]
    except OSError as error:
        return str(error)
    return None
