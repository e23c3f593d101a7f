"""Submits a job as a chain of dependent Slurm jobs: prepare, a job array for each phase, finish.

    prepare -> map[0..N-1] -> ... -> reduce[0..N-1] -> finish      each afterok of the one before
                                                       report      afternotok of finish

All of them run `slurm/data_prep.sbatch`, so its header and sbatch's environment variables apply to all. If a job fails,
Slurm cancels the later ones (--kill-on-invalid-dep), and report names the failed jobs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.config.corpus import CorpusConfig
from data_prep.job.directory import Job
from data_prep.job.phases import phases_of
from headrace.base.errors import ConfigError, DataError
from headrace.base.shipped import SHARE

DEFAULT_SHARES = 8
_PREFIX = "headrace-"
_FAILED = "F,TO,OOM,NF,CA,PR,BF,DL"
_SHOWN, _LINES = 5, 5


def submit(config: CorpusConfig, *, file: str, overrides: Sequence[str], shares: int | None) -> str:
    """Submits the chain; returns the message for the user.

    Args:
        file, overrides: the config as on the command line; relative paths start in the working directory.
        shares: Slurm jobs in the array of each phase.

    Raises:
        ConfigError: there is no Slurm, or sbatch fails.
        DataError: a chain for this output is queued or running.
    """
    if shutil.which("sbatch") is None:
        why, remedy = "there is no sbatch on PATH", "submit where Slurm is installed"
        raise ConfigError("--executor", "slurm", why=why, remedy=remedy)
    root = Job(config).root.absolute()
    names = [phase.name for phase in phases_of(config)]
    _check_no_other_chain(root, names)
    return _Chain(root, ["--config", file, *(word for value in overrides for word in ("--set", value))]).submit(
        names, shares or DEFAULT_SHARES
    )


class _Chain:
    """Submits the jobs of a chain, each dependent on the one before."""

    def __init__(self, root: Path, config: list[str]) -> None:
        self._root, self._config = root, config
        # in a checkout the real file, beside which the environment is
        self._script = (SHARE / "slurm" / "data_prep.sbatch").resolve()
        self._jobs: list[tuple[str, str]] = []

    def submit(self, phases: Sequence[str], shares: int) -> str:
        """See the docstring of this module. If a submission fails, the jobs submitted before are canceled."""
        try:
            first = self._add("prepare", ["prepare", *self._config])
            log = _log_of(first)
            logs = log.with_suffix("")
            append = [f"--output={log}", "--open-mode=append"]
            for name in phases:
                array = [f"--array=0-{shares - 1}", f"--output={logs}-{name}-%a.out"]
                self._add(name, ["phase", name, "--of", str(shares), *self._config], *array)
            self._add("finish", ["finish", *self._config], *append)
            jobs = [f"{name}={number}" for name, number in self._jobs]
            self._add("report", ["--report", f"{logs}", *jobs], *append, after="afternotok")
        except BaseException:
            subprocess.run(["scancel", *(number for _, number in self._jobs)], check=False, capture_output=True)
            raise
        submitted = ", ".join(f"{name} {number}" for name, number in self._jobs[:-1])
        return f"submitted: {submitted}; {shares} jobs for each phase\nlogs: {log}, {logs}-PHASE-*.out"

    def _add(self, name: str, arguments: Sequence[str], *options: str, after: str = "afterok") -> str:
        if self._jobs:
            options = (f"--dependency={after}:{self._jobs[-1][1]}", *options)
        # --kill-on-invalid-dep: a job whose dependency has failed is canceled, instead of waiting for ever
        common = ["--parsable", "--export=ALL", "--kill-on-invalid-dep=yes", f"--comment={self._root}"]
        command = ["sbatch", *common, f"--job-name={_PREFIX}{name}", *options, str(self._script), *arguments]
        environment = os.environ | {"HEADRACE_ROOT": str(self._script.parents[1])}
        if not (self._script.parents[1] / ".venv").is_dir():  # an installed wheel: the environment that runs now
            activate = Path(sys.prefix) / "bin" / "activate"
            environment.setdefault("HEADRACE_VENV", sys.prefix if activate.is_file() else "")
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            why = f"sbatch failed for the {name} job: {done.stderr.strip() or done.returncode}"
            remedy = "edit the header of slurm/data_prep.sbatch, or --workers N (Slurm's MaxArraySize is the limit)"
            raise ConfigError("--executor", "slurm", why=why, remedy=remedy)
        number = done.stdout.strip().split(";")[0]  # ID, or ID;CLUSTER
        self._jobs.append((name, number))
        return number


def _check_no_other_chain(root: Path, phases: Sequence[str]) -> None:
    """Raises DataError if another chain exists: two would do all the work twice, though the output would be right."""
    names = ",".join(_PREFIX + name for name in ("prepare", *phases, "finish"))
    rows = _run_command("squeue", "--noheader", f"--name={names}", "--format=%F|%j|%T|%k")
    own = sorted({tuple(row.split("|")[:3]) for row in rows if row.split("|", 3)[3] == str(root)})
    if own:
        listed = ", ".join(f"{name} {number} ({state.lower()})" for number, name, state in own)
        numbers = " ".join(number for number, _, _ in own)
        why = f"a chain for {root} is queued or running: {listed}"
        raise DataError(f"{why}\n  try: wait for it, or scancel {numbers} and submit again: finished tasks are kept")


def _log_of(job: str) -> Path:
    """The log file of the first job, as the header sets it: the others write beside it."""
    shown = " ".join(_run_command("scontrol", "show", "job", "--oneliner", job))
    found = re.search(r"\bStdOut=(\S+)", shown)
    return Path(found[1]) if found else Path(f"slurm-{job}.out").absolute()


def _run_command(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why, remedy = f"{command[0]}: {done.stderr.strip()}", "try again when Slurm is available"
        raise ConfigError("--executor", "slurm", why=why, remedy=remedy)
    return done.stdout.splitlines()


def report(logs: str, jobs: Sequence[str]) -> list[str]:
    """The report of the last job of a chain that failed: the failed jobs and the ends of their logs.

    Args:
        logs: prefix of the names of the logs.
        jobs: NAME=ID of each job of the chain, in order.
    """
    numbers = dict(job.split("=", 1)[::-1] for job in jobs)
    form = "--format=%F|%K|%T|%r"
    rows = _run_command("squeue", "--noheader", "--array", f"--jobs={','.join(numbers)}", f"--states={_FAILED}", form)
    # jobs that Slurm canceled for a failed dependency are not the cause
    failed = [row for row in (line.split("|") for line in rows) if not row[3].startswith("Dependency")]
    lines = [f"error: the job was not finished: {len(failed)} of its Slurm jobs failed. The first of them:"]
    for number, element, state, reason in sorted(failed, key=_job_order)[:_SHOWN]:
        name = numbers[number]
        log = Path(f"{logs}-{name}-{element}.out" if element.isdigit() else f"{logs}.out")
        which = f"{name} {element}" if element.isdigit() else name
        lines.append(f"{which} (job {number}): {state} ({reason})")
        if element.isdigit() and log.is_file():  # one that never started has no log
            lines.append(f"the end of {log}:")
            lines += [f"    {line}" for line in log.read_text(errors="replace").splitlines()[-_LINES:]]
    return [*lines, "  try: fix the cause, then submit again: finished tasks are skipped"]


def _job_order(row: Sequence[str]) -> tuple[int, int]:
    return int(row[0]), int(row[1]) if row[1].isdigit() else -1


if __name__ == "__main__":
    print("\n".join(report(sys.argv[1], sys.argv[2:])), file=sys.stderr)
    sys.exit(1)  # so that the chain's last job is FAILED
