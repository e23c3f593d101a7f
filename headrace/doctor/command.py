"""`headrace doctor`: checks a machine, or all nodes of a Slurm job, before the first training on it."""

from __future__ import annotations

import argparse
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from foundation.errors import ConfigError
from foundation.paths import LOCAL
from headrace.doctor.check import Check, Context, Finding
from headrace.doctor.cluster import DoctorNodes, find_nodes
from headrace.doctor.report import LINES, PAGE, DoctorReport
from headrace.doctor.runner import DoctorAgents
from headrace.doctor.table import CHECKS, GPUS, selected
from pipeline.config.load import load_config
from pipeline.config.rules.resolve import resolve
from pipeline.runtime.launch import detect

FAILED = 1
"""Exit code if a check has failed."""
_ON_CPU = 2
"""Number of ranks of a machine without GPUs."""
_TEXT = """\
Checks a machine before the first training on it: driver and GPUs, node, compilers, connections and bandwidth of all
ranks, attention, gradients, pipeline schedules, checkpoints, lost ranks, memory and MFU.

Every check is a process with a limit of one or two minutes, and none outlives doctor. Exit code 0: a training may
start; 1: a check has failed; 2: the command or the config is wrong. In a Slurm job it checks all of its nodes."""


@dataclass(frozen=True)
class DoctorOptions:
    """What to check.

    Attributes:
        out: directory of the results, shared by all nodes.
        config: the run's config; None for the checks' own small ones.
        overrides: texts of `--set`.
        processes: ranks of each node; 0 for one per GPU, or 2 on the CPU.
        all_layouts: whether every layout is tried.
        as_json: whether to print JSON lines.
    """

    out: Path
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    processes: int = 0
    all_layouts: bool = False
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.description = _TEXT
    add: Callable[..., Any] = parser.add_argument
    add("--config", metavar="FILE", type=LOCAL, help="config of the first run, whose layout is checked; default: none")
    text = "override one field of it, e.g. --set run.steps=100 (repeatable)"
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text)
    add("--nproc", type=int, metavar="N", help="ranks of each node; default: one per GPU, 2 without a GPU")
    add("--nodes", metavar="N|NAME,...", help="nodes of the Slurm job; default: all")
    add("--all", dest="all_layouts", action="store_true", help="try every layout, not only the config's: takes longer")
    add("--only", action="append", default=[], metavar="NAME,...", help="make only these checks (repeatable)")
    add("--list", dest="listed", action="store_true", help="list the checks, and make none")
    text = "directory for doctor.jsonl, doctor.html and logs, shared by all nodes; default: doctor"
    add("--out", default="doctor", metavar="DIR", type=LOCAL.as_path(), help=text)
    add("--json", dest="as_json", action="store_true", help="print findings as JSON lines")


def run(arguments: argparse.Namespace) -> int:
    """Makes the checks; returns the exit code.

    Raises:
        ConfigError: an argument or the config is wrong; nothing has been started then.
    """
    checks = selected(CHECKS, [name.strip() for text in arguments.only for name in text.split(",")])
    if arguments.listed:
        width = max(len(check.name) for check in checks)
        print("\n".join(f"{check.name:{width}}  {check.place:8}  {check.text}" for check in checks))
        return 0
    config = None if arguments.config is None else Path(arguments.config).absolute()
    _check_arguments(arguments, config)
    options = DoctorOptions(
        arguments.out.absolute(),
        config,
        tuple(arguments.overrides),
        arguments.nproc or 0,
        arguments.all_layouts,
        arguments.as_json,
    )
    return diagnose(checks, options, find_nodes(arguments.nodes))


def diagnose(checks: Sequence[Check], options: DoctorOptions, nodes: DoctorNodes) -> int:
    """Makes checks on nodes, and writes what they find into `options.out`.

    Returns:
        0 if nothing has failed, otherwise `FAILED`.

    Raises:
        ConfigError: the config cannot run on so many ranks.
        TrainingError: the agent of a node does not start.
    """
    for name in ("work", "logs"):
        with suppress(FileNotFoundError):
            shutil.rmtree(options.out / name)
        (options.out / name).mkdir(parents=True)
    title = f"Doctor: {', '.join(nodes.addresses)}"
    with (options.out / LINES).open("w") as lines, _ended_by_sigterm():
        report = DoctorReport(lines, options.as_json)
        try:
            with DoctorAgents(nodes) as agents:
                _make_all(checks, options, nodes, agents, report)
        finally:
            report.write_page(options.out / PAGE, title=title)
    code = FAILED if any(map(report.failed, checks)) else 0
    if not options.as_json:
        print(f"{report.verdict}\n{options.out / PAGE}", flush=True)
    return code


def _make_all(
    checks: Sequence[Check], options: DoctorOptions, nodes: DoctorNodes, agents: DoctorAgents, report: DoctorReport
) -> None:
    processes, stopped = options.processes, dict[str, str]()  # check that failed or was skipped -> why
    for number, check in enumerate(checks, 1):
        report.begin(check, number=number, total=len(checks))
        if because := next((stopped[name] for name in check.needs if name in stopped), None):
            report.add(check, Finding(None, f"skipped, because {because}"))
            stopped[check.name] = because
            continue
        if check.name != GPUS:
            processes = processes or _ON_CPU
            _check_layout(options, processes * len(nodes.addresses))
        work = options.out / "work" / check.name.replace(" ", "-")
        work.mkdir()
        context = Context(
            options.config,
            options.overrides,
            work,
            options.all_layouts,
            check.limit_s,
            processes,
            nodes=nodes.addresses,
        )
        for finding in agents.run(check, context):
            report.add(check, finding)
        for finding in _compared(check, report.findings(check)):
            report.add(check, finding)
        if check.name == GPUS:
            counts = [int(each.figures[GPUS]) for each in report.findings(check) if GPUS in each.figures]
            processes = processes or min(counts, default=0)
        if report.failed(check):
            stopped[check.name] = f"'{check.name}' has failed"
        else:
            shutil.rmtree(work, ignore_errors=True)


def _compared(check: Check, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Lets a check of nodes compare what it has found on several, by its function `compare`, if it has one."""
    if check.place == "node" and len({finding.where for finding in findings}) > 1:
        yield from getattr(import_module(check.module), "compare", lambda _findings: ())(findings)


def _check_arguments(arguments: argparse.Namespace, config: Path | None) -> None:
    if arguments.nproc is not None and arguments.nproc < 1:
        raise ConfigError("--nproc", arguments.nproc, why="it is a number of ranks", remedy="use 1 or more")
    if (launch := detect()).launcher != "python":
        why = f"this process was started by {launch.launcher}, and doctor starts its ranks itself"
        raise ConfigError("doctor", why=why, remedy=f"start one process, or unset {' '.join(launch.variables)}")
    if config is not None:
        load_config(config, arguments.overrides)
    elif arguments.overrides:
        raise ConfigError("--set", arguments.overrides[0], why="there is no config", remedy="give --config FILE, too")


def _check_layout(options: DoctorOptions, world_size: int) -> None:
    """Raises ConfigError if the config cannot run on so many ranks."""
    if options.config is not None:
        resolve(load_config(options.config, options.overrides), world_size=world_size)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end doctor as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
