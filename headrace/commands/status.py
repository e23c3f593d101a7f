"""`headrace status [RUN]`: how far a run or a data-prep job is, from any terminal, without touching it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.base import configfile
from headrace.base.cli import guarded
from headrace.base.directory import MANIFEST
from headrace.base.errors import ConfigError
from headrace.commands.lazy import new_app
from pipeline.status.command import show_log, show_run, show_runs
from pipeline.status.find import run_dir_of
from pipeline.status.reason import job_reason

app = new_app()
_RUN = "a run's directory or config, or those of a data-prep job (default: the runs below the working directory)"


@app.command()
def status(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help=_RUN)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object, once")] = False,
    once: Annotated[bool, typer.Option("--once", help="print once; a terminal shows a running run live")] = False,
    log: Annotated[bool, typer.Option("--log", help="print the merged log of all attempts and ranks")] = False,
    reason: Annotated[bool, typer.Option("--reason", help="print only why the last attempt ended")] = False,
) -> None:
    """Shows how far a run is, live: step, loss, tokens/s, goodput, time left, restarts, checkpoint, Slurm job."""

    def show() -> None:
        if run is None and (log or reason):
            raise ConfigError("RUN", why="--log and --reason are of one run", remedy="give its directory or config")
        if run is None:
            show_runs(Path.cwd(), as_json=as_json)
        elif (lines := data_prep_lines(run)) is not None:
            typer.echo(json.dumps({"data_prep": lines}) if as_json else "\n".join(lines))
        elif reason:
            typer.echo(f"reason: {job_reason(run_dir_of(run), code=None)}")
        elif log:
            show_log(run_dir_of(run))
        else:
            show_run(run_dir_of(run), as_json=as_json, once=once)

    raise typer.Exit(guarded(show))


def data_prep_lines(path: Path) -> list[str] | None:
    """The phases of a data-prep job, given by its config, its directory or its output; None of anything else.

    Raises:
        DataError: it has not begun, or its files are damaged.
        ConfigError: the config cannot be read.
    """
    if path.is_dir():
        if not (_is_job(path) or _is_job(path.with_name(f".{path.name}.job")) or _kind(path) == "tokens"):
            return None
        from data_prep.job.status import report_of  # noqa: PLC0415

        return report_of(path)
    if path.suffix not in configfile.SUFFIXES or not configfile.load(path).keys() >= {"output", "sources"}:
        return None
    from data_prep.config.corpus import load  # noqa: PLC0415
    from data_prep.job.status import report  # noqa: PLC0415

    return report(load(str(path)))


def _is_job(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".job") and path.is_dir()


def _kind(path: Path) -> str | None:
    try:
        kind = json.loads((path / MANIFEST).read_text())["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kind if isinstance(kind, str) else None
