"""A ladder as Slurm jobs: an array for the sweep, an array for the runs, and the fit, each after the job before.

    sweep (array) -> extend the sweep, if its best rate is at its end -> runs (array) -> fit

Every array element is this command with `--phase`, through `slurm/pipeline.sbatch`: it trains the run with the
element's number. A chain that lost an element is submitted again: finished runs are not trained again.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from foundation.errors import ConfigError
from foundation.shipped import SHARE
from foundation.slurm import cancel_jobs, submit_job
from pipeline.plan.ladder.plan import Ladder
from pipeline.plan.ladder.runs import LOGS

PHASES = ("sweep", "extend", "runs", "fit")
_SCRIPT = Path("slurm", "pipeline.sbatch")
_ELEMENT = "SLURM_ARRAY_TASK_ID"


def element() -> int | None:
    """The number of this element of a job array; None outside of one."""
    number = os.environ.get(_ELEMENT)
    return None if number is None else int(number)


def submit(ladder: Ladder, words: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Submits the chain of jobs.

    Args:
        ladder: planned ladder.
        words: arguments of `headrace ladder` for every job.
        say: function that prints a line.

    Raises:
        ConfigError: sbatch is missing or refuses a job; then no job of the chain is left in the queue.
    """
    if shutil.which("sbatch") is None:
        why = "there is no sbatch on PATH"
        raise ConfigError("--slurm", why=why, remedy="submit where Slurm is, or leave it out")
    (ladder.output / LOGS).mkdir(parents=True, exist_ok=True)
    sizes = {"sweep": len(ladder.sweep()), "runs": len(ladder.runs())}
    jobs: list[str] = []
    try:
        for phase in PHASES:
            jobs.append(_submit(ladder, phase, words, size=sizes.get(phase), after=jobs[-1:]))
            of = f", an array of {sizes[phase]}" if phase in sizes else ""
            say(f"{phase:>14}  job {jobs[-1]}{of}")
    except ConfigError:
        cancel_jobs(jobs)
        raise
    say(f"{'logs':>14}  {ladder.output / LOGS}/slurm-*.out; the prediction is at the end of slurm-fit-{jobs[-1]}.out")


def _submit(ladder: Ladder, phase: str, words: Sequence[str], *, size: int | None, after: Sequence[str]) -> str:
    """Submits one job or array; returns its number."""
    root = _root()
    pattern = "%A-%a" if size is not None else "%j"
    options = [f"--job-name=headrace-ladder-{phase}", f"--output={ladder.output / LOGS}/slurm-{phase}-{pattern}.out"]
    options += [f"--array=0-{size - 1}"] if size is not None else []
    # cancels a job whose dependency has failed, which would wait for ever
    options += [f"--dependency=afterok:{after[0]}", "--kill-on-invalid-dep=yes"] if after else []
    command = ["sbatch", "--parsable", *options, str(root / _SCRIPT), "ladder", *words, "--phase", phase]
    environment = {**os.environ, "HEADRACE_ROOT": os.environ.get("HEADRACE_ROOT", str(root))}

    def refused(said: str) -> ConfigError:
        remedy = f"correct what it names; the command was {shlex.join(command)}"
        return ConfigError("--slurm", why=f"sbatch failed: {said}", remedy=remedy)

    return submit_job(command, refused=refused, environ=environment)


def _root() -> Path:
    """The checkout, or the files of the installed package."""
    clone = SHARE.parents[1]
    return clone if (clone / _SCRIPT).is_file() else SHARE
