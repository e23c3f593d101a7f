"""`headrace submit CONFIG...`: data prep to compression as Slurm jobs, each after those whose output it reads."""

from __future__ import annotations

import argparse

from foundation.errors import ConfigError
from foundation.paths import LOCAL

_TEXT = """\
Submits data prep, training, export and compression to Slurm as a chain of jobs.

The kind of a config follows from its keys. A stage waits for the earlier stages whose output its config names. The jobs
run a copy of the code and of the configs, in the run's directory, so that later edits do not reach them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.description = _TEXT
    text = "configs: a corpus, trainings, a compression, in order"
    parser.add_argument("configs", metavar="CONFIG", type=LOCAL, nargs="+", help=text)
    text = "nodes of each training: one number, or one for each config"
    parser.add_argument("--nodes", default="1", metavar="N[,N...]", help=text)
    text = "processes on each node (default: one per GPU, or 1)"
    parser.add_argument("--tasks-per-node", type=_at_least_one, metavar="N", help=text)
    text = "jobs in each array of data prep (default: 8)"
    parser.add_argument("--workers", type=_at_least_one, metavar="N", help=text)
    text = "override one field of the training configs (repeatable)"
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "train once with each value, as a job array with a run directory each; several make a grid"
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=VALUE,VALUE,...", help=text)
    text = "settings of the site (default: slurm/site.toml)"
    parser.add_argument("--site", type=LOCAL.as_path(), metavar="FILE", help=text)
    text = "first check the nodes of each training by headrace doctor; the training starts if nothing has failed"
    parser.add_argument("--doctor", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the scripts; submit and write nothing")


def run(arguments: argparse.Namespace) -> None:
    """Submits the jobs, or prints them."""
    from headrace.submission.request import Request  # noqa: PLC0415
    from headrace.submission.submit import submit  # noqa: PLC0415

    request = Request(
        files=arguments.configs,
        overrides=arguments.overrides,
        nodes=_numbers(arguments.nodes),
        tasks=arguments.tasks_per_node,
        workers=arguments.workers,
        sweeps=arguments.sweep,
        site=arguments.site,
        doctor=arguments.doctor,
        dry_run=arguments.dry_run,
    )
    submit(request, say=lambda text: print(text, flush=True))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError("--nodes", text, why="it is not a number of nodes", remedy="e.g. --nodes 2, or --nodes 2,4")
    return [int(word) for word in words]
