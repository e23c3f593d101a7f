"""Finds the run that the user means, by its directory, its config or the working directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from foundation import configfile
from foundation.directory import kind_of
from foundation.errors import ConfigError, DataError
from foundation.foreign_json import read_json
from foundation.remote_run import up_to_date
from pipeline.cluster.status.slurm import QueuedJob, own_jobs, run_dir_of_job
from pipeline.runtime.metrics.attempts_journal import NAME as ATTEMPTS
from pipeline.runtime.metrics.journal import NAME as JOURNAL

SUBMISSIONS = "submissions"
"""Folder of `headrace submit` in a run's directory."""
_USUAL = ("*", "runs/*", "out/*", "out/runs/*", "out/*/runs/*")
"""Patterns of run directories below the working directory."""


def run_dir_of(path: Path, overrides: Sequence[str] = ()) -> Path:
    """Returns a run's directory, given the directory or the run's config file; it may be missing while its job waits.

    Raises:
        DataError: the directory belongs to data prep, or holds something other than a run.
        ConfigError: the path is a config file without run.dir, or no config file at all.
    """
    if path.is_dir():
        _refuse_other_directory(path)
        return path
    if path.suffix not in configfile.SUFFIXES:
        if waiting_jobs(path):
            return path
        raise DataError(
            f"{path}: no such directory\n  try: the directory that run.dir names in a config, or the config"
        )
    raw = configfile.load(path, overrides)
    if "output" in raw and "sources" in raw:
        raise DataError(f"{path} is the config of a data-prep job\n  try: headrace prep status --config {path}")
    run = raw.get("run")
    if not isinstance(run, dict) or not isinstance(run.get("dir"), str):
        remedy = "give a run's directory, or the config it was started with"
        raise ConfigError("run.dir", why=f"{path} does not name a run's directory", remedy=remedy)
    return up_to_date(run["dir"])


def found_runs(root: Path) -> list[Path]:
    """Lists run directories in the usual places below a directory, newest write first."""
    journals = {path.parent for glob in _USUAL for name in (ATTEMPTS, JOURNAL) for path in root.glob(f"{glob}/{name}")}
    return sorted(journals, key=_written, reverse=True)


def waiting_jobs(run_dir: Path) -> list[QueuedJob]:
    """Lists this user's Slurm jobs that are to train in a directory."""
    return [job for job, where in jobs_with_runs() if where is not None and where.resolve() == run_dir.resolve()]


def jobs_with_runs() -> list[tuple[QueuedJob, Path | None]]:
    """Lists this user's waiting and running Slurm jobs, with the run directory if their command line names it."""
    return [(job, run_dir_of_job(job)) for job in own_jobs()]


def submitted_logs(run_dir: Path) -> list[Path]:
    """Lists the logs of `headrace submit`'s jobs, the oldest submission first; some jobs may never have trained."""
    folders = [path for path in (run_dir / SUBMISSIONS).glob("*") if path.name.isdecimal()]
    return [log for path in sorted(folders, key=lambda path: int(path.name)) for log in sorted(path.glob("logs/*.out"))]


def not_begun(run_dir: Path) -> DataError:
    """Makes the error for a run that has not begun, with the log of its last job, which may have failed early."""
    logs = submitted_logs(run_dir)
    if not logs and (submitted := _newest_submission(run_dir)) is not None:
        folder, jobs = submitted
        listed = ", ".join(f"{name} (job {', '.join(numbers)})" for name, numbers in jobs.items())
        corpus, first = folder / "configs" / "data.json", next(iter(jobs.values()))[0]
        remedy = f"headrace prep status --config {corpus}" if "data" in jobs else f"scontrol show job {first}"
        why = f"no run has begun there: {folder} was submitted as {listed}, and no job of it has written a log"
        return DataError(f"{run_dir}: {why}\n  try: {remedy}")
    if not logs:
        return DataError(f"{run_dir}: no run has begun there\n  try: the directory that run.dir names in its config")
    why = f"no run has begun there: its last job wrote {logs[-1]}"
    return DataError(f"{run_dir}: {why}\n  try: headrace status {run_dir} --log")


def _newest_submission(run_dir: Path) -> tuple[Path, dict[str, list[str]]] | None:
    """Returns the newest submission's folder and stage -> its jobs; None without a readable submission."""
    folders = [path for path in (run_dir / SUBMISSIONS).glob("*") if path.name.isdecimal()]
    with suppress(OSError, ValueError, DataError, KeyError, TypeError, AttributeError):
        newest = max(folders, key=lambda path: int(path.name))
        raw = read_json(newest / "submission.json")
        jobs = {str(name): [str(number) for number in numbers] for name, numbers in raw["jobs"].items() if numbers}
        return (newest, jobs) if jobs else None
    return None


def _written(run_dir: Path) -> float:
    return max((run_dir / name).stat().st_mtime for name in (ATTEMPTS, JOURNAL) if (run_dir / name).exists())


def _refuse_other_directory(path: Path) -> None:
    if (path / "job.json").exists() or (path.name.startswith(".") and path.name.endswith(".job")):
        raise DataError(f"{path} is the directory of a data-prep job\n  try: headrace prep status --config CORPUS.json")
    if (kind := kind_of(path)) is None:
        return
    if kind in ("tokens", "packing"):
        raise DataError(f"{path} holds finished tokens\n  try: headrace prep stats {path}")
    if kind == "checkpoint":
        raise DataError(f"{path} is a checkpoint\n  try: headrace status {path.parent.parent}")
    if kind != "run":
        raise DataError(f"{path} holds a '{kind}', not a run\n  try: the directory that run.dir names in a config")
