"""`headrace submit CONFIG...`: the whole way as Slurm jobs, each after those whose output it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.base.cli import guarded
from headrace.base.errors import ConfigError
from headrace.commands.config_kinds import complete_override
from headrace.commands.lazy import new_app

app = new_app()


@app.command()
def submit(
    configs: Annotated[
        list[str],
        typer.Argument(metavar="CONFIG...", help="configs: a corpus, trainings, a compression, in order"),
    ],
    nodes: Annotated[
        str,
        typer.Option(metavar="N[,N...]", help="nodes of each training: one number, or one for each config"),
    ] = "1",
    tasks_per_node: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="processes on each node (default: one per GPU, or 1)"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="jobs in each array of data prep (default: 8)")
    ] = None,
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="override one field of the training configs (repeatable)",
            autocompletion=complete_override("run"),
        ),
    ] = [],  # noqa: B006  typer copies it
    sweep: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE,VALUE,...",
            help="train once with each value, as a job array with a run directory each; several make a grid",
        ),
    ] = [],  # noqa: B006
    site: Annotated[
        Path | None, typer.Option(metavar="FILE", help="settings of the site (default: slurm/site.toml)")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the scripts; submit and write nothing")] = False,
) -> None:
    """Submits data prep, training, export and compression to Slurm as a chain of jobs.

    What a config is follows from its keys. A stage waits for those before it whose output its config names. The jobs
    run a copy of the code and of the configs, in the run's directory, so that later edits do not reach them.
    """

    def run() -> None:
        from headrace.submission.request import Request  # noqa: PLC0415
        from headrace.submission.submit import submit  # noqa: PLC0415

        request = Request(
            files=configs,
            overrides=overrides,
            nodes=_numbers(nodes),
            tasks=tasks_per_node,
            workers=workers,
            sweeps=sweep,
            site=site,
            dry_run=dry_run,
        )
        submit(request, say=typer.echo)

    raise typer.Exit(guarded(run))


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError("--nodes", text, why="it is not a number of nodes", remedy="e.g. --nodes 2, or --nodes 2,4")
    return [int(word) for word in words]
