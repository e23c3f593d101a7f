"""Runs Slurm's commands to completion and returns their output; submits and cancels jobs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

_MISSING, _TIMED_OUT = 127, 124
"""Exit codes of a shell for a missing command, and of timeout(1)."""


def run_slurm(
    *command: str, environ: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command; a missing program or a time-out counts as a failure, with the reason in `stderr`.

    Args:
        environ: environment of the command; None for this process's.
        timeout_s: seconds after which the command is killed; None for no limit, as a controller may be busy.
    """
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environ,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, _MISSING, "", str(error))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, _TIMED_OUT, "", f"{command[0]} did not answer in {timeout_s:g} s")


def submit_job(
    command: Sequence[str], *, refused: Callable[[str], Exception], environ: Mapping[str, str] | None = None
) -> str:
    """Submits a job; returns its number.

    Args:
        command: command line of sbatch, with --parsable.
        refused: function that makes an error from sbatch's message.
        environ: environment of sbatch; None for this process's.

    Raises:
        Exception: sbatch has failed; `refused` makes the error.
    """
    done = run_slurm(*command, environ=environ)
    if done.returncode:
        raise refused(done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout.strip().split(";")[0]  # ID, or ID;CLUSTER


def cancel_jobs(numbers: Sequence[str]) -> None:
    """Cancels jobs, as far as Slurm still knows them."""
    if numbers:
        run_slurm("scancel", *numbers)
