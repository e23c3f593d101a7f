"""`python -m data_prep status`: the progress of a job, read from its job directory, on any machine that sees it."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.config.corpus import CorpusConfig
from data_prep.job.directory import Job
from data_prep.job.phases import phases_of
from data_prep.job.slurm import CHAIN_LOG, FAILURE, last_logs
from foundation.directory import read_manifest
from foundation.errors import DataError
from foundation.remote_output import finished
from foundation.section import parse

_LOG_LINES = 8
_SILENT_S = 30.0
"""Age of a status note, in seconds, above which its process is reported as silent (suspended or lost)."""


@dataclass(frozen=True)
class PhaseStatus:
    """Tasks of a phase; `total` is None until the phase before has finished, if only that phase determines it."""

    name: str
    finished: int
    total: int | None


def report(config: CorpusConfig) -> list[str]:
    """Reports the progress of a job, as lines of text.

    Raises:
        DataError: there is neither a job nor an output.
    """
    job = Job(config)
    if not job.root.is_dir():
        if finished(config.output, kind="tokens") is None:
            raise DataError(f"there is no job in {job.root}, and no {config.output}{_last_chain(job.output)}")
        return [f"{config.output} is finished"]
    if job.saved_identity() is None:
        return [f"{job.root}: checking the inputs"]
    lines = [_line(phase) for phase in phases(job) if phase.total != 0]
    return lines + [_worker(note, age) for note, age in _notes(job.root)] + _failure(job.root)


def report_of(directory: Path) -> list[str]:
    """Reports the progress of a job, given its directory `.NAME.job` or its output NAME, as lines of text.

    Raises:
        DataError: there is neither a job nor an output, or job.json is damaged.
    """
    name = directory.name
    of_job = name.startswith(".") and name.endswith(".job")
    output = directory.with_name(name[1 : -len(".job")]) if of_job else directory
    root = output.with_name(f".{output.name}.job")
    if not root.is_dir():
        read_manifest(output, kind="tokens")
        return [f"{output} is finished"]
    try:
        identity = json.loads((root / "job.json").read_bytes())["config"]
    except FileNotFoundError:
        return [f"{root}: checking the inputs"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{root / 'job.json'} is damaged: {error!r}\n  try: rm -r {root} to start over") from None
    return report(parse(CorpusConfig, {**identity, "output": str(output)}))


def phases(job: Job) -> list[PhaseStatus]:
    """The phases of a planned job and the number of their finished tasks."""
    tokenizer = job.tokenizer_task(job.load_plan())
    found = [PhaseStatus("tokenizer", int(tokenizer.finished), 1)]
    for phase in phases_of(job.config):
        try:
            tasks = phase.tasks(job)
        except DataError:  # the phase before has not finished
            found.append(PhaseStatus(phase.name, 0, None))
        else:
            found.append(PhaseStatus(phase.name, sum(task.finished for task in tasks), len(tasks)))
    return found


def _failure(root: Path) -> list[str]:
    """Lines on the failure of the last chain of Slurm jobs; empty without one."""
    with suppress(OSError):
        return ["the last chain of Slurm jobs failed:", *(root / FAILURE).read_text().splitlines()]
    return []


def _last_chain(output: Path) -> str:
    """State of a chain of Slurm jobs that has not started the job, and what to do."""
    logs = last_logs(output)
    if logs is None:
        return "\n  try: start it"
    with suppress(OSError):
        end = (logs / CHAIN_LOG).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        lines = [f"; the end of {logs / CHAIN_LOG}:", *(f"    {line}" for line in end)]
        return "\n".join([*lines, "  try: fix the cause, then submit again"])
    return f": its chain of Slurm jobs has not written to {logs} yet\n  try: squeue shows whether it waits"


def _line(phase: PhaseStatus) -> str:
    if phase.total is None:
        return f"{phase.name:>10}: waiting"
    return f"{phase.name:>10}: {phase.finished:,} of {phase.total:,} tasks finished"


def _worker(note: dict[str, Any], age_s: float) -> str:
    process = f"{note['host']}:{note['pid']}"
    if note["ended"]:
        return f"  {process} ended {note['phase']} after {note['seconds']:,.0f} s"
    silent = f", silent for {age_s:,.0f} s" if age_s > _SILENT_S else ""
    return f"  {process} {note['phase']} {100 * note['share']:.0f}% {note['line']}{silent}"


def _notes(root: Path) -> list[tuple[dict[str, Any], float]]:
    """The last status note of each process of a job, and its age in seconds by the clock of the file system."""
    now = _now(root)
    found = []
    for path in sorted((root / "progress").glob("[!.]*.json")):
        with suppress(OSError, ValueError):  # being replaced or removed
            found.append((json.loads(path.read_text()), max(0.0, now - path.stat().st_mtime)))
    return found


def _now(root: Path) -> float:
    """The time by the clock of the file system, since the clocks of machines differ."""
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=root, prefix=".clock") as file:
        return Path(file.name).stat().st_mtime
    return max(path.stat().st_mtime for path in root.iterdir())
