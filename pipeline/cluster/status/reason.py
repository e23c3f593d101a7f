"""One line with the reason why the last attempt of a run ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from foundation.errors import DataError
from pipeline.cluster.status.run import RunReader, RunStatus
from pipeline.runtime.launch.host_memory import HOST_MEMORY

_OUT_OF_MEMORY = 253
"""Exit code of srun if its task was killed for exceeding memory (Slurm 22.05)."""
_BY_SLURM = {
    "TIMEOUT": "the job reached its time limit",
    "CANCELLED": "the job was cancelled",
    "NODE_FAIL": "a node of the job failed",
    "OUT_OF_MEMORY": "the job ran out of host memory",
    "PREEMPTED": "the job was preempted",
    "DEADLINE": "the job reached its deadline",
    "BOOT_FAIL": "a node of the job did not boot",
}


def reason_of(status: RunStatus) -> str:
    """Tells why the last attempt ended: the cause, with its time, exit code and what was saved."""
    if agents_ended(status):
        assert status.agents is not None
        return f"the agents ended the run with code {status.agents.outcome}: {_first(status.agents.reason)}"
    if not status.attempts:
        return "finished" if status.finished else "no attempt is recorded in this directory"
    last = status.attempts[-1]
    if last.ended is None:
        return f"attempt {last.number} has not ended"
    if last.code == 0:
        return "finished"
    killed = last.code is None
    slurm = next((text for job in status.jobs if killed and (text := _BY_SLURM.get(job.state))), "")
    why = f"{slurm} (Slurm); {last.reason}" if slurm else last.reason
    code = "" if killed else f" (exit code {last.code})"
    return f"{why}{code}; {_kept(status)}"


def agents_ended(status: RunStatus) -> bool:
    """Tells whether the run's agents have given it up, and nothing else has started it since."""
    agents = status.agents
    if agents is None or agents.outcome in (None, 0, 75, 130):
        return False
    return not status.attempts or agents.written >= status.attempts[-1].started


def job_reason(run_dir: Path, *, code: int | None, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the last line of a job's output: why this job's last attempt ended, never an earlier job's.

    Args:
        run_dir: the run's directory.
        code: exit code of the ranks, where the caller knows it.
        environ: environment variables, which name this Slurm job.
    """
    try:
        status = RunReader(run_dir, slurm=False).read()
    except DataError as error:
        return _unbegun(code, _first(str(error)) if code is not None else " ".join(str(error).split()))
    if code == 0:
        return "finished"
    job, last = environ.get("SLURM_JOB_ID"), status.attempts[-1] if status.attempts else None
    requeue = environ.get("SLURM_RESTART_COUNT")
    if last is None and job is None and code is None:  # called from outside the job
        return reason_of(status)
    if last is None or (job, requeue) not in ((None, requeue), (last.job, last.requeue)):
        return _unbegun(code, "no attempt of this job has begun")
    if code == _OUT_OF_MEMORY:
        return f"{' '.join(HOST_MEMORY.split())}; {reason_of(status)}"
    return reason_of(status)


def _unbegun(code: int | None, why: str) -> str:
    if code is None:  # called later, from outside the job: no output is above
        return f"refused or ended before training began: {why}"
    return f"refused or ended before training began (exit code {code}): the error is above; {why}"


def _kept(status: RunStatus) -> str:
    if status.newest is None:
        return "no checkpoint was written"
    damage = f", which is damaged: {status.newest.damage}" if status.newest.damage else ""
    lost = status.step - status.newest.step
    steps = f", {lost:,} step{'s' if lost > 1 else ''} before the last" if lost > 0 else ""
    return f"the newest checkpoint is of step {status.newest.step:,}{steps}{damage}"


def _first(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]
