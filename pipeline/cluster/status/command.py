"""`python -m pipeline status [RUN]`: a run's progress, from any terminal. `headrace status` also covers data prep."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from foundation.errors import ConfigError, DataError
from foundation.paths import LOCAL, RUN
from pipeline.cluster.status.find import found_runs, jobs_with_runs, not_begun, run_dir_of, submitted_logs, waiting_jobs
from pipeline.cluster.status.log import log_lines, merged_log
from pipeline.cluster.status.reason import job_reason, reason_of
from pipeline.cluster.status.run import RunReader, RunStatus, has_begun, plain
from pipeline.cluster.status.slurm import QueuedJob, output_files
from pipeline.cluster.status.text import job_line, line, lines_of, state_text, step_text
from pipeline.runtime.metrics.times import clock

_INTERVAL_S = 2.0
_WIDTH = 160
"""Columns of a table that is written to a file or a pipe."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `python -m pipeline status`."""
    text = "a run's directory, or its config file (default: the runs below the working directory)"
    parser.add_argument("run", metavar="RUN", type=RUN, nargs="?", help=text)
    parser.add_argument(
        "--config", metavar="FILE", type=LOCAL, help="the run's config file, in place of RUN, as job scripts have it"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --config: override one field",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, once")
    parser.add_argument("--once", action="store_true", help="print once; otherwise a terminal shows a running run live")
    parser.add_argument("--log", action="store_true", help="print the merged log of all attempts and ranks")
    text = "print one line that says why the last attempt ended; in a job script as its last line"
    parser.add_argument("--reason", action="store_true", help=text)
    parser.add_argument("--code", type=int, metavar="N", help="with --reason: the exit code of the ranks")


def run(arguments: argparse.Namespace) -> int:
    """Shows one run, or all runs that are found."""
    if arguments.run is not None and arguments.config is not None:
        raise ConfigError("--config", arguments.config, why="RUN is given, too", remedy="give one of the two")
    given = arguments.run or arguments.config
    if given is None:
        if arguments.reason or arguments.log:
            raise ConfigError("RUN", why="--reason and --log show one run", remedy="give its directory or config")
        show_runs(Path.cwd(), as_json=arguments.json)
        return 0
    run_dir = run_dir_of(Path(given), arguments.overrides)
    if arguments.reason:
        print(f"reason: {job_reason(run_dir, code=arguments.code)}", flush=True)
    elif arguments.log:
        show_log(run_dir)
    else:
        show_run(run_dir, as_json=arguments.json, once=arguments.once)
    return 0


def show_run(run_dir: Path, *, as_json: bool, once: bool) -> None:
    """Prints the status of a run; on a terminal it is refreshed for as long as the run trains or its job waits.

    Raises:
        DataError: no run has begun in the directory, and no job is queued to begin one.
    """
    reader, status = _opened(run_dir)
    console = Console(highlight=False)
    if as_json:
        print(json.dumps({**status.plain(), "reason": reason_of(status)}))
    elif once or not console.is_terminal or not _may_change(status):
        for text in lines_of(status):
            print(text)
    else:
        _follow(console, reader, status, lines_of)


def show_log(run_dir: Path) -> None:
    """Prints the merged log of a run.

    Raises:
        DataError: no run has begun in the directory, and no job of `headrace submit` has written anything.
    """
    begun, logs = has_begun(run_dir), submitted_logs(run_dir)
    if not begun and not logs:
        raise not_begun(run_dir)
    status = _opened(run_dir)[1] if begun else None
    outputs = output_files([job.id for job in status.jobs]) if status is not None else []
    for text in log_lines(merged_log(run_dir, outputs=[*logs, *outputs])):
        print(text)
    if status is not None:
        print(f"reason: {reason_of(status)}")


def show_runs(root: Path, *, as_json: bool) -> None:
    """Prints a table of the runs below a directory, and of this user's Slurm jobs.

    Raises:
        DataError: there are neither runs nor jobs.
    """
    jobs = jobs_with_runs()
    known = {where.resolve(): job for job, where in jobs if where is not None}
    folders = found_runs(root)
    folders += [path for path in known if path not in {each.resolve() for each in folders} and has_begun(path)]
    statuses = [status for path in folders if (status := _read(path)) is not None]
    shown = {status.dir.resolve() for status in statuses}
    others = [job for job, where in jobs if where is None or where.resolve() not in shown]
    if as_json:
        print(json.dumps({"runs": [each.plain() for each in statuses], "jobs": plain([job for job, _ in jobs])}))
        return
    if not statuses and not others:
        raise DataError(f"no run was found below {root}, and no Slurm job of yours\n  try: headrace status RUN")
    if statuses:
        wide = None if Console().is_terminal else _WIDTH
        Console(highlight=False, width=wide).print(_table(statuses, known, root))
    for job in others:
        print(line("Slurm job", f"{job.name} {job_line(job)}"))


def _opened(run_dir: Path) -> tuple[RunReader, RunStatus]:
    """Opens a run; where nothing trains in its directory now, with the jobs that are queued to train there."""
    if has_begun(run_dir):
        reader = RunReader(run_dir)
        status = reader.read()
        if status.training or status.finished:
            return reader, status
    reader = RunReader(run_dir, jobs=[job.id for job in waiting_jobs(run_dir)])
    return reader, reader.read()


def _may_change(status: RunStatus) -> bool:
    """Tells whether the status will change without the user's doing."""
    return bool(status.training) or any(job.state in ("PENDING", "RUNNING", "CONFIGURING") for job in status.jobs)


def _follow(
    console: Console, reader: RunReader, status: RunStatus, lines: Callable[[RunStatus], Iterator[str]]
) -> None:
    with Live(_text(lines(status)), console=console, auto_refresh=False) as live:
        while _may_change(status):
            time.sleep(_INTERVAL_S)
            status = reader.read()
            live.update(_text(lines(status)), refresh=True)


def _text(lines: Iterator[str]) -> Text:
    return Text("\n".join(lines))


def _read(run_dir: Path) -> RunStatus | None:
    """Reads a run for the table; warns and returns None where its files are damaged."""
    try:
        return RunReader(run_dir, slurm=False).read()
    except DataError as error:
        print(f"warning: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def _table(statuses: Sequence[RunStatus], jobs: dict[Path, QueuedJob], root: Path) -> Table:
    table = Table()
    for name in ("run", "state", "step", "loss", "tokens/s", "goodput", "left", "job"):
        table.add_column(name, justify="left" if name in ("run", "state", "job") else "right", overflow="fold")
    for each in statuses:
        job = jobs.get(each.dir.resolve())
        speed = "" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}"
        left = "" if each.seconds_left is None or each.finished else clock(each.seconds_left)
        where = str(each.dir.relative_to(root)) if each.dir.is_relative_to(root) else str(each.dir)
        loss = "" if each.loss is None else f"{each.loss:.4f}"
        share = "" if each.goodput is None else f"{each.goodput.share:.1%}"
        waits = "" if job is None else f"{job.id} {job.state}"
        table.add_row(where, state_text(each), step_text(each), loss, speed, share, left, waits)
    return table
