"""`headrace doctor`: checks a machine, or all nodes of a Slurm job, before the first training on it."""

from __future__ import annotations

import argparse
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from foundation.errors import ConfigError
from foundation.paths import LOCAL
from headrace.doctor.check import Check, Context, Finding
from headrace.doctor.cluster import DoctorNodes, find_nodes
from headrace.doctor.rank import BROKEN
from headrace.doctor.report import LINES, PAGE, DoctorReport
from headrace.doctor.runner import DoctorAgents, started_agents
from headrace.doctor.table import GPUS, read_checks, selected
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.description, add = _TEXT, parser.add_argument
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
    checks = selected(read_checks(), [name.strip() for text in arguments.only for name in text.split(",")])
    if arguments.listed:
        print("\n".join(f"{check.name:16}{check.place:10}{check.text}" for check in checks))
        return 0
    config, processes, overrides = arguments.config, arguments.nproc or 0, tuple(arguments.overrides)
    if arguments.nproc is not None and processes < 1:
        raise ConfigError("--nproc", arguments.nproc, why="it is a number of ranks", remedy="use 1 or more")
    if (launch := detect()).launcher != "python":
        why = f"this process was started by {launch.launcher}, and doctor starts its ranks itself"
        raise ConfigError("doctor", why=why, remedy=f"start one process, or unset {' '.join(launch.variables)}")
    if overrides and not config:
        raise ConfigError("--set", overrides[0], why="there is no config", remedy="give --config FILE, too")
    nodes = find_nodes(arguments.nodes)
    if config:
        loaded = load_config(config, overrides)
        if processes:
            resolve(loaded, world_size=processes * len(nodes.addresses))
    out, config = arguments.out.absolute(), Path(config).absolute() if config else None
    if out.exists() and not (out / LINES).exists() and (not out.is_dir() or next(out.iterdir(), None)):
        why = "there are files, and none of an earlier doctor, which would be replaced"
        raise ConfigError("--out", str(out), why=why, remedy="name a new directory")
    context = Context(config, overrides, out, arguments.all_layouts, 0.0, processes)
    if not processes and checks[0].name != GPUS:  # which counts them
        checks = [*selected(read_checks(), [GPUS]), *checks]
    return diagnose(checks, context, nodes, as_json=arguments.as_json)


def diagnose(checks: Sequence[Check], context: Context, nodes: DoctorNodes, *, as_json: bool = False) -> int:
    """Makes checks on nodes, and writes what they find into a directory; SIGTERM ends it as Ctrl-C does.

    Args:
        checks: the checks in order.
        context: the part that the contexts of all checks share; its `work` is the directory of the results.
        nodes: the nodes.
        as_json: whether to print JSON lines.

    Returns:
        0 if nothing has failed, otherwise `FAILED`.

    Raises:
        TrainingError: the agent of a node does not start.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out, context = context.work, replace(context, nodes=nodes.addresses)
    for name in ("work", "logs"):
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
    with (out / LINES).open("w") as lines:
        report = DoctorReport(lines, as_json)
        try:
            with started_agents(nodes) as agents:
                _make_all(checks, context, agents, report)
            report.finished = True
        finally:
            report.write_page(out / PAGE, title=f"Doctor: {', '.join(nodes.addresses)}")
    if not as_json:
        print(f"{report.verdict}\n{out / PAGE}", flush=True)
    return FAILED if any(map(report.failed, checks)) else 0


def _make_all(checks: Sequence[Check], context: Context, agents: DoctorAgents, report: DoctorReport) -> None:
    out, stopped = context.work, dict[str, str]()  # check that failed or was skipped -> why
    for number, check in enumerate(checks, 1):
        report.begin(check, f"{number}/{len(checks)}")
        if because := next((stopped[name] for name in check.needs if name in stopped), None):
            report.add(check, Finding(None, f"skipped, because {because}"))
            stopped[check.name] = because
            continue
        if check.name != GPUS:
            context = replace(context, processes=context.processes or _ON_CPU)
        work = out / "work" / check.name.replace(" ", "-")
        work.mkdir()
        for finding in agents.run(check, replace(context, work=work, limit_s=check.limit_s)):
            report.add(check, finding)
        for finding in _unequal(report.findings(check)) if check.equal else ():
            report.add(check, finding)
        if not context.processes:
            counts = [int(each.figures[GPUS]) for each in report.findings(check) if GPUS in each.figures]
            context = replace(context, processes=min(counts, default=0))
        if not report.findings(check):
            report.add(check, Finding(False, f"{check.name}: it has reported nothing", BROKEN, "read its log"))
        if report.failed(check):
            stopped[check.name] = f"'{check.name}' has failed"
        else:
            shutil.rmtree(work, ignore_errors=True)


def _unequal(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yields figures that differ between nodes."""
    nodes = {each.where: each.figures for each in findings if each.figures}
    for name in dict.fromkeys(name for figures in nodes.values() for name in figures):
        having: dict[str, list[str]] = {}
        for node, figures in nodes.items():
            having.setdefault(str(figures.get(name, "none")), []).append(node)
        if len(having) > 1:
            text = "; ".join(f"{value} on {', '.join(each)}" for value, each in having.items())
            meaning = "ranks of different nodes wait for each other, or compute different numbers"
            remedy = "give all nodes the same devices and one environment, or leave some out: --nodes"
            yield Finding(False, f"{name}: {text}", meaning, remedy)
