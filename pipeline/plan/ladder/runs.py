"""Trains the unfinished runs of a ladder, each by `headrace train` in its own process, and reads their losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from foundation.directory import MANIFEST, read_manifest, write_json
from foundation.errors import EXIT_REQUEUE, ConfigError
from foundation.processes import die_with_parent, signals_passed_on
from pipeline.plan.ladder.plan import Ladder, LadderRun
from pipeline.runtime.metrics.journal import read_rows

CONFIGS, LOGS = "configs", "logs"
_POLL_S = 0.2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Done:
    """A finished run of a ladder.

    Attributes:
        run: planned run.
        loss: held-out loss after the last step, in nats per token.
    """

    run: LadderRun
    loss: float


def finished_loss(run_dir: Path, *, steps: int) -> float | None:
    """The held-out loss of a run after its last step; None while it is not finished."""
    if not (run_dir / MANIFEST).is_file() or not read_manifest(run_dir, kind="run").details.get("finished"):
        return None
    rows = [row for row in read_rows(run_dir, kind="eval") if row["step"] == steps]
    return float(rows[-1]["loss"]) if rows else None


def done_of(ladder: Ladder, runs: Sequence[LadderRun]) -> list[Done]:
    """The finished runs, with their losses."""
    losses = [(run, finished_loss(ladder.run_dir(run), steps=run.steps)) for run in runs]
    return [Done(run, loss) for run, loss in losses if loss is not None]


def write_config(ladder: Ladder, run: LadderRun) -> Path:
    """Writes the config of a run, and returns the file.

    Raises:
        ConfigError: the run was begun with another config.
    """
    path, config = ladder.output / CONFIGS / f"{run.name}.json", ladder.config(run)
    plain = json.loads(json.dumps(config))
    if path.is_file() and ladder.run_dir(run).exists() and json.loads(path.read_text()) != plain:
        why = f"{ladder.run_dir(run)} was trained with another config: {path}"
        raise ConfigError("--output", str(ladder.output), why=why, remedy="another --output, or remove this one")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, config)
    return path


def train_all(ladder: Ladder, runs: Sequence[LadderRun], *, jobs: int, nproc: int, say: Say) -> int:
    """Trains the unfinished runs, several at a time.

    Args:
        ladder: ladder with the directory and the configs of the runs.
        runs: runs to train, largest last, so that the longest runs end together.
        jobs: number of runs trained at the same time.
        nproc: processes of each run.
        say: function that prints a line.

    Returns:
        0, or the exit code of the first run that failed or was asked to stop. The other runs at work are waited for,
        and the same command resumes.
    """
    known = {each.run.name for each in done_of(ladder, runs)}
    waiting = [run for run in {run.name: run for run in runs}.values() if run.name not in known]
    commands = [_command(write_config(ladder, run), nproc) for run in waiting]
    if known:
        say(f"{len(known)} of {len(known) + len(waiting)} runs were done before")
    return _train(ladder, list(zip(waiting, commands, strict=True)), jobs=jobs, say=say)


def _train(ladder: Ladder, waiting: list[tuple[LadderRun, list[str]]], *, jobs: int, say: Say) -> int:
    code, total = 0, len(waiting)
    working: dict[subprocess.Popen[bytes], LadderRun] = {}
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack, signals_passed_on(processes) as stopped:
        while working or (waiting and not code and not stopped()):
            while waiting and len(working) < jobs and not code and not stopped():
                run, command = waiting.pop(0)
                say(f"run {total - len(waiting)} of {total}: {run.name}, {run.steps} steps of {run.samples} samples")
                process = stack.enter_context(_started(ladder, run, command))
                processes.append(process)
                working[process] = run
            for process in [each for each in working if each.poll() is not None]:
                code = _ended(ladder, working.pop(process), process.returncode, say=say) or code
                processes.remove(process)
            time.sleep(_POLL_S)
        return code or (EXIT_REQUEUE if stopped() else 0)


def _started(ladder: Ladder, run: LadderRun, command: list[str]) -> subprocess.Popen[bytes]:
    logs = ladder.output / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{run.name}.log").open("ab") as log:
        # a run that outlived a killed ladder would train beside its own restart
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ, preexec_fn=die_with_parent)  # noqa: PLW1509


def _ended(ladder: Ladder, run: LadderRun, code: int, *, say: Say) -> int:
    """Reports how a run ended; returns its exit code."""
    loss = finished_loss(ladder.run_dir(run), steps=run.steps)
    if loss is not None:
        say(f"  {run.name}: held-out loss {loss:.4f}")
        return 0
    code = 128 - code if code < 0 else code
    if code == EXIT_REQUEUE:
        say(f"  {run.name}: stopped, saved")
        return code
    log = ladder.output / LOGS / f"{run.name}.log"
    say(f"  {run.name}: ended with exit code {code}: {' | '.join(_last_lines(log))} ({log})")
    return code or 1


def _last_lines(log: Path) -> Iterator[str]:
    yield from (line.strip() for line in log.read_text(errors="replace").splitlines()[-3:])


def _command(config: Path, nproc: int) -> list[str]:
    words = ["train", "--config", str(config), *(["--nproc", str(nproc)] if nproc > 1 else [])]
    return [sys.executable, "-P", "-m", "pipeline", *words]
