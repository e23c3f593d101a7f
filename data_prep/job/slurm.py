"""The job as a chain of Slurm jobs: prepare, an array of jobs for each phase, finish; each when the one before is done.

    prepare -> map[0..N-1] -> ... -> reduce[0..N-1] -> finish      afterok, each
                                                       report      afternotok of finish, which goes when it cannot run

All of them are `slurm/data_prep.sbatch`, so its header holds for all; and so do the variables that sbatch reads.
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

DEFAULT_SHARES = 8
_PREFIX = "headrace-"
_FAILED = "F,TO,OOM,NF,CA,PR,BF,DL"
_SHOWN, _LINES = 5, 5


def submit(config: CorpusConfig, *, file: str, overrides: Sequence[str], shares: int | None) -> str:
    """Submits the chain; returns what to tell the user.

    Args:
        file, overrides: the config as it was given on the command line; relative paths start here.
        shares: jobs for each phase.

    Raises:
        ConfigError: this is no Slurm cluster, or it refuses. DataError: a chain for this output waits or runs.
    """
    if shutil.which("sbatch") is None:
        why, remedy = "there is no sbatch on PATH", "submit where Slurm is installed"
        raise ConfigError("--executor", "slurm", why=why, remedy=remedy)
    root = Job(config).root.absolute()
    names = [phase.name for phase in phases_of(config)]
    _refuse_twins(root, names)
    return _Chain(root, ["--config", file, *(word for value in overrides for word in ("--set", value))]).submit(
        names, shares or DEFAULT_SHARES
    )


class _Chain:
    """Submits the links of a chain, each after the one before."""

    def __init__(self, root: Path, config: list[str]) -> None:
        self._root, self._config = root, config
        self._script = Path(__file__).parents[2] / "slurm" / "data_prep.sbatch"
        self._links: list[tuple[str, str]] = []
        if not self._script.is_file():
            why, remedy = f"there is no {self._script}", 'install from the repository: pip install -e "PATH"'
            raise ConfigError("--executor", "slurm", why=why, remedy=remedy)

    def submit(self, phases: Sequence[str], shares: int) -> str:
        """See the head of this file. A chain that is not accepted to its end is removed."""
        try:
            first = self._add("prepare", ["prepare", *self._config])
            log = _log_of(first)
            logs = log.with_suffix("")
            into = [f"--output={log}", "--open-mode=append"]
            for name in phases:
                array = [f"--array=0-{shares - 1}", f"--output={logs}-{name}-%a.out"]
                self._add(name, ["phase", name, "--of", str(shares), *self._config], *array)
            self._add("finish", ["finish", *self._config], *into)
            links = [f"{name}={number}" for name, number in self._links]
            self._add("report", ["--report", f"{logs}", *links], *into, after="afternotok")
        except BaseException:
            subprocess.run(["scancel", *(number for _, number in self._links)], check=False, capture_output=True)
            raise
        said = ", ".join(f"{name} {number}" for name, number in self._links[:-1])
        return f"submitted: {said}; {shares} jobs for each phase\nlogs: {log}, {logs}-PHASE-*.out"

    def _add(self, name: str, arguments: Sequence[str], *options: str, after: str = "afterok") -> str:
        if self._links:
            options = (f"--dependency={after}:{self._links[-1][1]}", *options)
        # --kill-on-invalid-dep: a job whose turn can never come goes, instead of waiting for ever
        common = ["--parsable", "--export=ALL", "--kill-on-invalid-dep=yes", f"--comment={self._root}"]
        command = ["sbatch", *common, f"--job-name={_PREFIX}{name}", *options, str(self._script), *arguments]
        environment = os.environ | {"HEADRACE_ROOT": str(self._script.parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            why = f"sbatch refuses the {name} job: {done.stderr.strip() or done.returncode}"
            remedy = "edit the header of slurm/data_prep.sbatch, or --workers N (Slurm's MaxArraySize is the limit)"
            raise ConfigError("--executor", "slurm", why=why, remedy=remedy)
        number = done.stdout.strip().split(";")[0]  # ID, or ID;CLUSTER
        self._links.append((name, number))
        return number


def _refuse_twins(root: Path, phases: Sequence[str]) -> None:
    """Two chains would do no harm to the output, but all the work twice."""
    names = ",".join(_PREFIX + name for name in ("prepare", *phases, "finish"))
    rows = _asked("squeue", "--noheader", f"--name={names}", "--format=%F|%j|%T|%k")
    own = sorted({tuple(row.split("|")[:3]) for row in rows if row.split("|", 3)[3] == str(root)})
    if own:
        listed = ", ".join(f"{name} {number} ({state.lower()})" for number, name, state in own)
        numbers = " ".join(number for number, _, _ in own)
        why = f"a chain for {root} is queued or running: {listed}"
        raise DataError(f"{why}\n  try: wait for it, or scancel {numbers} and submit again: what is finished is kept")


def _log_of(job: str) -> Path:
    """Where the first link writes, whatever the header says: the others write there, too."""
    shown = " ".join(_asked("scontrol", "show", "job", "--oneliner", job))
    found = re.search(r"\bStdOut=(\S+)", shown)
    return Path(found[1]) if found else Path(f"slurm-{job}.out").absolute()


def _asked(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why, remedy = f"{command[0]}: {done.stderr.strip()}", "try again when Slurm answers"
        raise ConfigError("--executor", "slurm", why=why, remedy=remedy)
    return done.stdout.splitlines()


def report(logs: str, links: Sequence[str]) -> list[str]:
    """What the last job of a chain says when it did not come to its end.

    Args:
        logs: what the names of the logs begin with. links: NAME=ID of each, in order.
    """
    numbers = dict(link.split("=", 1)[::-1] for link in links)
    form = "--format=%F|%K|%T|%r"
    rows = _asked("squeue", "--noheader", "--array", f"--jobs={','.join(numbers)}", f"--states={_FAILED}", form)
    # what never had its turn was cancelled by Slurm, and is not the cause
    failed = [row for row in (line.split("|") for line in rows) if not row[3].startswith("Dependency")]
    lines = [f"error: the job was not finished: {len(failed)} of its Slurm jobs failed. The first of them:"]
    for number, element, state, reason in sorted(failed, key=_place)[:_SHOWN]:
        name = numbers[number]
        log = Path(f"{logs}-{name}-{element}.out" if element.isdigit() else f"{logs}.out")
        which = f"{name} {element}" if element.isdigit() else name
        lines.append(f"{which} (job {number}): {state} ({reason})")
        if element.isdigit() and log.is_file():  # one that never started has no log
            lines.append(f"the end of {log}:")
            lines += [f"    {line}" for line in log.read_text(errors="replace").splitlines()[-_LINES:]]
    return [*lines, "  try: mend the cause, then submit again: finished tasks are skipped"]


def _place(row: Sequence[str]) -> tuple[int, int]:
    return int(row[0]), int(row[1]) if row[1].isdigit() else -1


if __name__ == "__main__":
    print("\n".join(report(sys.argv[1], sys.argv[2:])), file=sys.stderr)
    sys.exit(1)  # so that the chain's last job is FAILED
