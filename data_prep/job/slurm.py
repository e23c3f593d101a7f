"""Submits a job as a chain of dependent Slurm jobs: prepare, a job array for each phase, finish.

    prepare -> map[0..N-1] -> ... -> reduce[0..N-1] -> finish      each afterok of the job before
                                                       report      afternotok of finish

All of them run `slurm/data_prep.sbatch`: its header and sbatch's environment variables apply to all. If a job fails,
Slurm cancels the later jobs (--kill-on-invalid-dep), and report (`slurm_report.py`) names the failed ones.

Every chain has its own directory for logs beside the output, `NAME.logs/1/`, `NAME.logs/2/`, ... Its chain.out is the
log of prepare, finish and report, PHASE-K.out that of element K of a phase.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.config.corpus import CorpusConfig
from data_prep.job.directory import Job
from data_prep.job.phases import phases_of
from foundation.errors import ConfigError, DataError
from foundation.shipped import SHARE
from foundation.slurm import cancel_jobs, run_slurm, submit_job

DEFAULT_SHARES = 8
FAILURE = "failure.txt"
"""File in the job directory that describes the last chain's failure, until the next chain is submitted."""
CHAIN_LOG = "chain.out"
"""File name of the common log of prepare, finish and report."""
_PREFIX = "headrace-"


@dataclass(frozen=True)
class ChainJob:
    """One job of a chain.

    Attributes:
        name: "prepare", a phase, "finish" or "report".
        arguments: arguments of the script.
        options: options of sbatch, without the dependency.
        after: type of Slurm dependency on the job before: "afterok" or "afternotok".
    """

    name: str
    arguments: tuple[str, ...]
    options: tuple[str, ...]
    after: str = "afterok"


@dataclass(frozen=True)
class JobChain:
    """The jobs of a chain, in order, before they are submitted.

    Attributes:
        root: the job directory, which identifies a second chain.
        script: file that all jobs run.
        environment: variables for sbatch in addition to the present environment.
    """

    root: Path
    logs: Path
    shares: int
    phases: tuple[str, ...]
    config: tuple[str, ...]
    script: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def jobs(self) -> list[ChainJob]:
        """All jobs except report, which needs their numbers."""
        chain = self._chain_log
        found = [ChainJob("prepare", ("prepare", *self.config), chain)]
        for name in self.phases:
            log = f"--output={self.logs}/{name}-%a.out"
            options = (f"--array=0-{self.shares - 1}", log, "--open-mode=append")
            found.append(ChainJob(name, ("phase", name, "--of", str(self.shares), *self.config), options))
        return [*found, ChainJob("finish", ("finish", *self.config), chain)]

    def report_job(self, numbers: Sequence[tuple[str, str]]) -> ChainJob:
        """The job that runs if another job fails; `numbers`: (name, id) of each other job."""
        told = (f"{name}={number}" for name, number in numbers)
        arguments = ("--report", str(self.logs), str(self.root), str(self.shares), *told)
        return ChainJob("report", arguments, self._chain_log, after="afternotok")

    def command(self, job: ChainJob, *, dependency: str | None) -> list[str]:
        """The command line that submits a job; `dependency`: number of the job before."""
        # --kill-on-invalid-dep cancels a job whose dependency has failed, which would wait for ever
        common = ["--parsable", "--export=ALL", "--kill-on-invalid-dep=yes", f"--comment={self.root}"]
        before = [] if dependency is None else [f"--dependency={job.after}:{dependency}"]
        own = [f"--job-name={_PREFIX}{job.name}", *before, *job.options]
        return ["sbatch", *common, *own, str(self.script), *job.arguments]

    @property
    def _chain_log(self) -> tuple[str, ...]:
        return f"--output={self.logs}/{CHAIN_LOG}", "--open-mode=append"


def plan_chain(
    config: CorpusConfig, *, words: Sequence[str], shares: int | None = None, script: Path | None = None
) -> JobChain:
    """Plans the chain of a config; writes nothing.

    Args:
        words: arguments of the command line that name the config; relative paths start in the working directory.
        shares: number of Slurm jobs in each phase's array; None for 8.
        script: script that the jobs run; None for the shipped script.
    """
    job = Job(config)
    given = script is not None
    # in a checkout, the real file: the environment is beside it
    script = script or (SHARE / "slurm" / "data_prep.sbatch").resolve()
    return JobChain(
        job.root.absolute(),
        _next_logs(job.output),
        shares or DEFAULT_SHARES,
        tuple(phase.name for phase in phases_of(config)),
        tuple(words),
        script,
        {} if given else _environment(script.parents[1]),
    )


def submit(config: CorpusConfig, *, file: str, overrides: Sequence[str], shares: int | None) -> str:
    """Submits a config's chain; returns the message for the user.

    Raises:
        ConfigError: Slurm is missing, or sbatch fails.
        DataError: a chain for this output is queued or running.
    """
    words = ["--config", file, *(word for value in overrides for word in ("--set", value))]
    chain = plan_chain(config, words=words, shares=shares)
    numbers = submit_chain(chain)
    submitted = ", ".join(f"{name} {number}" for name, number in numbers[:-1])
    logs = f"logs: {chain.logs}/{CHAIN_LOG}, {chain.logs}/PHASE-*.out"
    return f"submitted: {submitted}; {chain.shares} jobs for each phase\n{logs}"


def submit_chain(chain: JobChain) -> list[tuple[str, str]]:
    """Submits a chain; if a submission fails, the jobs submitted before are canceled.

    Returns:
        (name, number) of each job in order; the last two are finish and report.

    Raises:
        ConfigError: Slurm is missing, or sbatch fails.
        DataError: a chain for this output is queued or running.
    """
    if shutil.which("sbatch") is None:
        why, remedy = "there is no sbatch on PATH", "submit where Slurm is installed"
        raise ConfigError("--executor", "slurm", why=why, remedy=remedy)
    _check_no_other_chain(chain.root, chain.phases)
    _make_logs(chain.logs)
    (chain.root / FAILURE).unlink(missing_ok=True)
    numbers: list[tuple[str, str]] = []
    try:
        for job in chain.jobs():
            numbers.append((job.name, _submit_job(chain, job, numbers)))
        report = chain.report_job(numbers)
        numbers.append((report.name, _submit_job(chain, report, numbers)))
    except BaseException:
        cancel_jobs([number for _, number in numbers])
        with suppress(OSError):  # a job has written there
            chain.logs.rmdir()
            chain.logs.parent.rmdir()
        raise
    return numbers


def _make_logs(logs: Path) -> None:
    logs.parent.mkdir(parents=True, exist_ok=True)
    try:
        logs.mkdir()
    except FileExistsError:
        why = f"another chain is being submitted at this moment: it has made {logs}"
        raise DataError(f"{why}\n  try: squeue shows its jobs; submit again when they have ended") from None


def _submit_job(chain: JobChain, job: ChainJob, numbers: Sequence[tuple[str, str]]) -> str:
    command = chain.command(job, dependency=numbers[-1][1] if numbers else None)

    def refused(said: str) -> ConfigError:
        remedy = "edit the header of slurm/data_prep.sbatch, or --workers N (Slurm's MaxArraySize is the limit)"
        why = f"sbatch failed for the {job.name} job: {said}"
        return ConfigError("--executor", "slurm", why=why, remedy=remedy)

    return submit_job(command, refused=refused, environ=os.environ | chain.environment)


def _environment(root: Path) -> dict[str, str]:
    found = {"HEADRACE_ROOT": str(root)}
    if not (root / ".venv").is_dir() and "HEADRACE_VENV" not in os.environ:  # a wheel: use its environment
        activate = Path(sys.prefix) / "bin" / "activate"
        found["HEADRACE_VENV"] = sys.prefix if activate.is_file() else ""
    return found


def last_logs(output: Path) -> Path | None:
    """Directory of the logs of an output's last chain; None without a chain."""
    parent = _logs_of(output)
    taken = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
    return parent / str(max(taken)) if taken else None


def _logs_of(output: Path) -> Path:
    return output.absolute().parent / f"{output.name}.logs"


def _next_logs(output: Path) -> Path:
    last = last_logs(output)
    return _logs_of(output) / str(1 if last is None else int(last.name) + 1)


def _check_no_other_chain(root: Path, phases: Sequence[str]) -> None:
    """Raises DataError if another chain exists: two would do all work twice, though the output would be right."""
    names = ",".join(_PREFIX + name for name in ("prepare", *phases, "finish"))
    rows = run_command("squeue", "--noheader", f"--name={names}", "--format=%F|%j|%T|%k")
    own = sorted({tuple(row.split("|")[:3]) for row in rows if row.split("|", 3)[3] == str(root)})
    if own:
        listed = ", ".join(f"{name} {number} ({state.lower()})" for number, name, state in own)
        numbers = " ".join(number for number, _, _ in own)
        why = f"a chain for {root} is queued or running: {listed}"
        raise DataError(f"{why}\n  try: wait for it, or scancel {numbers} and submit again: finished tasks are kept")


def run_command(*command: str) -> list[str]:
    """Runs a command of Slurm; returns the lines that it prints.

    Raises:
        ConfigError: the command fails.
    """
    done = run_slurm(*command)
    if done.returncode:
        why, remedy = f"{command[0]}: {done.stderr.strip()}", "try again when Slurm is available"
        raise ConfigError("--executor", "slurm", why=why, remedy=remedy)
    return done.stdout.splitlines()
