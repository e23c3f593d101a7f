"""`headrace status RUN`: how far a training run is, from any terminal, without touching it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.base import configfile
from headrace.base.cli import guarded
from headrace.base.directory import MANIFEST
from headrace.base.errors import ConfigError, DataError
from headrace.commands.lazy import new_app
from pipeline.run.status import RunStatus, read_status

app = new_app()
_SHOWN = 5
"""Faults that are printed."""


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run's directory, or its config file")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Shows how far a training run is: step, loss, tokens/s, newest checkpoint, faults, and whether it trains now."""

    def show() -> None:
        found = read_status(run_dir_of(run))
        if as_json:
            typer.echo(json.dumps(found.plain()))
        else:
            for line in lines_of(found):
                typer.echo(line)

    raise typer.Exit(guarded(show))


def run_dir_of(path: Path) -> Path:
    """The directory of a run that is given by itself or by its config file.

    Raises:
        DataError: it is something of data prep, or a directory of another kind.
        ConfigError: it is a config file without run.dir, or none at all.
    """
    if path.is_dir():
        _refuse_other_directory(path)
        return path
    if path.suffix not in configfile.SUFFIXES:
        raise DataError(
            f"{path}: no such directory\n  try: the directory that run.dir names in a config, or the config"
        )
    raw = configfile.load(path)
    if "output" in raw and "sources" in raw:
        raise DataError(f"{path} is the config of a data-prep job\n  try: headrace prep status --config {path}")
    run = raw.get("run")
    if not isinstance(run, dict) or not isinstance(run.get("dir"), str):
        remedy = "give a run's directory, or the config it was started with"
        raise ConfigError("run.dir", why=f"{path} does not name a run's directory", remedy=remedy)
    return Path(run["dir"])


def lines_of(status: RunStatus) -> Iterator[str]:
    """What is printed."""
    done = f"{status.step:,}" if status.steps is None else f"{status.step:,} of {status.steps:,}"
    share = f" ({100 * status.step / status.steps:.0f} %)" if status.steps else ""
    yield _line("run", str(status.dir))
    yield _line("step", f"{done}{share}")
    if status.loss is not None:
        yield _line("loss", f"{status.loss:.4f} nats/token")
    if status.heldout_loss is not None:
        yield _line("held-out loss", f"{status.heldout_loss:.4f} nats/token")
    if status.tokens_per_second is not None:
        yield _line("speed", f"{status.tokens_per_second:,.0f} tokens/s")
    yield _line("checkpoint", "none yet" if status.checkpoint is None else str(status.checkpoint))
    yield _line("process", _process(status))
    for fault in status.faults[-_SHOWN:]:
        yield _line("fault", _fault(fault))
    if len(status.faults) > _SHOWN:
        yield _line("", f"and {len(status.faults) - _SHOWN} earlier ones; --json lists all")


def _process(status: RunStatus) -> str:
    idle = "" if status.idle_seconds is None else f"; the journal was written {_ago(status.idle_seconds)}"
    if status.training is None:
        return f"unknown: this file system has no locks{idle}"
    if status.training:
        return f"training now{idle}"
    return f"none{idle}" if not status.finished else "none: the run is finished"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"


def _fault(fault: dict[str, Any]) -> str:
    ranks = fault.get("ranks")
    who = f", rank {', '.join(str(each.get('rank')) for each in ranks)}" if isinstance(ranks, list) and ranks else ""
    why = fault.get("fault") or fault.get("why") or fault.get("cause")
    return f"{fault.get('event')} at step {fault.get('step')}{f': {why}' if why else ''}{who}"


def _line(label: str, text: str) -> str:
    return f"{label:>14}  {text}"


def _refuse_other_directory(path: Path) -> None:
    if (path / "job.json").exists() or (path.name.startswith(".") and path.name.endswith(".job")):
        raise DataError(f"{path} is the directory of a data-prep job\n  try: headrace prep status --config CORPUS.json")
    try:
        kind = json.loads((path / MANIFEST).read_text())["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if kind in ("tokens", "packing"):
        raise DataError(f"{path} holds finished tokens\n  try: headrace prep stats {path}")
    if kind == "checkpoint":
        raise DataError(f"{path} is a checkpoint\n  try: headrace status {path.parent.parent}")
    if kind != "run":
        raise DataError(f"{path} holds a '{kind}', not a run\n  try: the directory that run.dir names in a config")
