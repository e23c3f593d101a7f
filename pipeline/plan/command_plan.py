"""`headrace plan`: predicts memory, time, cost and bottleneck of a run before it starts, and proposes better layouts.

`--search` compares layouts, `--calibrate` measures the present machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.errors import ConfigError
from foundation.paths import LOCAL, RUN
from foundation.quick_imports import quick_imports
from pipeline.config.load import read_config
from pipeline.plan.imbalance import add_imbalance_argument

if TYPE_CHECKING:
    from pipeline.plan.predict.planned_run import PlannedRun

DEFAULT_MACHINE = "h100"
MARGIN = 0.05
"""Share of a device's memory that stays free in proposed layouts: the error of the formulas."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `python -m pipeline plan`."""
    parser.add_argument("--config", metavar="FILE", type=LOCAL, help="the config: JSON or YAML")
    text = "override one field, e.g. --set run.steps=100 (repeatable)"
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        type=LOCAL,
        help="a known machine (a100, h100, h200, b200, ...) or a machine's file; default: the device of this"
        f" machine, else {DEFAULT_MACHINE}. Several (h100,h200) or all: what the run costs on each, in one table."
        " With --calibrate: the file to write",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes (default: the fewest that the layout takes)")
    parser.add_argument("--processes", type=int, metavar="N", help="ranks, in the place of all devices of the nodes")
    add_imbalance_argument(parser)
    parser.add_argument("--tokens", type=float, metavar="T", help="length of the run in tokens, e.g. 1e11")
    text = "price of a GPU-hour, to print the cost of the run; for several machines also by name: h100=2.5,h200=3.8"
    parser.add_argument("--price", metavar="P", help=text)
    text = "with several machines: most days the run may take; the cheapest number of nodes is found"
    parser.add_argument("--deadline", type=float, metavar="DAYS", help=text)
    text = f"share of a device's memory that stays free in proposed layouts (default: {MARGIN:g})"
    parser.add_argument("--memory-margin", type=float, default=MARGIN, metavar="SHARE", help=text)
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        type=LOCAL,
        help="draw the simulated step: FILE.html, FILE.svg, or FILE.json for chrome://tracing and Perfetto:"
        " the passes of a pipeline, else the streams of computation and communication of a micro-batch",
    )
    parser.add_argument(
        "--search", action="store_true", help="compare the layouts that the rules allow, and write the best as a config"
    )
    parser.add_argument(
        "--verify",
        type=int,
        metavar="N",
        help="with --search: layouts whose step is executed on fake tensors, the fastest first (default: 12, or as "
        "many as a minute of CPU allows; 0: none)",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=LOCAL, help="with --search: where the page and the config go (default: out/plan)"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this machine in about a minute, and write its file"
    )
    parser.add_argument(
        "--score",
        action="store_true",
        help="compare trained runs with their predictions: plan --score RUN...",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=RUN, nargs="*", default=[], help="with --score: directories of runs"
    )
    parser.add_argument(
        "--save-calibration",
        metavar="FILE",
        type=LOCAL,
        help="with --score: write the machine that fits the runs, for --machine",
    )
    text = "print memory and time by part, all laws and sources in the place of the answer in 15 lines"
    parser.add_argument("--verbose", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Plans a run, searches layouts, compares machines, calibrates or scores."""
    _check(arguments)
    if arguments.calibrate:
        from pipeline.plan.calibration.calibrate import calibrate_command  # noqa: PLC0415  imports torch

        return calibrate_command(arguments.machine)
    if arguments.score:
        return _score(arguments)
    overrides = list(arguments.overrides)
    if arguments.tokens is not None:
        overrides += ["run.steps=null", f"run.tokens={int(arguments.tokens)}"]
    read_config(arguments.config, overrides)  # refused before torch is imported, which takes seconds
    with quick_imports():
        planned = open_planned(arguments, overrides)
    if _several(arguments):
        return _compare(planned, arguments)
    if arguments.search:
        from pipeline.plan.search.command_search import search_command  # noqa: PLC0415

        return search_command(planned, arguments, overrides)
    from pipeline.plan.show import answer, as_json, lines, report_of  # noqa: PLC0415

    report = report_of(planned, price=arguments.price, margin=arguments.memory_margin)
    drawn = None
    if arguments.timeline is not None:
        from pipeline.plan.drawing.write_timeline import write_timeline  # noqa: PLC0415

        drawn = write_timeline(planned, Path(arguments.timeline))
    if arguments.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        for line in lines(report) if arguments.verbose else answer(report).lines():
            print(line)
        if drawn is not None:
            print(f"{'timeline':>14}  {drawn}")
    sys.stdout.flush()
    return 0


def open_planned(arguments: argparse.Namespace, overrides: list[str]) -> PlannedRun:
    from pipeline.plan.predict.planned_run import open_run, present_machine  # noqa: PLC0415  imports torch
    from pipeline.runtime.machines.known import load_machine  # noqa: PLC0415

    if _several(arguments):  # each machine of the table gets its own number of nodes
        machine, nodes = load_machine(DEFAULT_MACHINE), None
    else:
        machine = load_machine(arguments.machine) if arguments.machine else present_machine(DEFAULT_MACHINE)
        nodes = arguments.nodes

    given: dict[str, Any] = {
        "nodes": nodes,
        "processes": arguments.processes,
        "imbalance": arguments.imbalance,
    }
    try:
        planned = open_run(arguments.config, overrides, machine, **given)
    except ConfigError as refused:
        if not (arguments.search or _several(arguments)):
            raise
        try:  # a search replaces the layout anyway
            planned = open_run(arguments.config, [*overrides, *_PLAIN_LAYOUT], machine, **given)
        except ConfigError:
            raise refused from None
        overrides += _PLAIN_LAYOUT
        note = f"The config's own layout is refused on these nodes and left out: {refused.field} {refused.why}."
        print(f"note: {note}", file=sys.stderr, flush=True)
        planned = replace(planned, notes=(*planned.notes, note))
    if planned.run.stages and (_several(arguments) or arguments.search):
        why = "machines and layouts are compared for a run whose steps are all alike"
        raise ConfigError("stages", why=why, remedy="plan each stage alone: --set stages=null, and its keys")
    return planned


_PLAIN_LAYOUT = (
    *(f"parallel.{axis}=null" for axis in ("pp", "tp", "cp", "ep", "hybrid_shard_size", "virtual_stages")),
    "parallel.schedule=1f1b",
    "train_micro_batch_size_per_gpu=1",
    "gradient_accumulation_steps=null",
)
"""Overrides that leave out the layout of a config."""


def _several(arguments: argparse.Namespace) -> bool:
    """Whether `--machine` asks for a table of machines."""
    name = arguments.machine or ""
    return "," in name or name.lower() == "all"


def _compare(planned: PlannedRun, arguments: argparse.Namespace) -> int:
    from pipeline.plan.search.machines import Question, as_json, compare, lines, machines_of  # noqa: PLC0415

    question = Question(arguments.nodes, arguments.deadline, arguments.memory_margin, _prices(arguments.price))
    offers, without = compare(planned, machines_of(arguments.machine), question)
    if arguments.json:
        print(json.dumps(as_json(offers, without), indent=2))
    else:
        for line in lines(planned, offers, without, question):
            print(line)
    sys.stdout.flush()
    return 0


def _prices(text: str | None) -> dict[str, float]:
    """Reads `--price` by machine; a number without a name, under "", is the price of all other machines.

    Raises:
        ConfigError: the price is not a positive number, or numbers by name.
    """
    found: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, _, number = part.rpartition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            found[name.strip()] = math.nan
        if not 0 < found[name.strip()] < math.inf:
            why = f"'{part}' is not a finite number above 0"
            raise ConfigError("--price", text, why=why, remedy="e.g. --price 2.5, or --price h100=2.5,h200=3.8")
    return found


def _score(arguments: argparse.Namespace) -> int:
    from pipeline.plan.calibration.command_score import score_command  # noqa: PLC0415  imports torch
    from pipeline.runtime.machines.known import load_machine  # noqa: PLC0415

    machine = load_machine(arguments.machine) if arguments.machine else None
    return score_command(arguments.runs, machine, save=arguments.save_calibration, as_json=arguments.json)


def _check(arguments: argparse.Namespace) -> None:
    """Refuses combinations of options that are not allowed, and impossible values."""
    _check_score(arguments)
    if arguments.config is None and not arguments.calibrate and not arguments.score:
        raise ConfigError("--config", why="there is no run to plan", remedy="--config FILE, or --calibrate, or --score")
    _check_machines(arguments)
    for name in ("nodes", "processes", "tokens", "deadline"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:  # NaN fails both comparisons
            why = "it is not above 0" if value <= 0 else "it is not a finite number"
            raise ConfigError(f"--{name}", value, why=why, remedy=f"e.g. --{name} 2")
    if arguments.nodes is not None and arguments.processes is not None:
        raise ConfigError(
            "--nodes", arguments.nodes, why="--processes says how many ranks", remedy="give one of the two"
        )
    if arguments.timeline is not None:
        _check_timeline(arguments)
    if arguments.verify is not None and arguments.verify < 0:
        raise ConfigError("--verify", arguments.verify, why="it is a number of layouts", remedy="0 or more")


def _check_machines(arguments: argparse.Namespace) -> None:
    """Refuses options that do not go with the number of machines; for one machine, turns `--price` into a number."""
    several, prices = _several(arguments), _prices(arguments.price)
    if not several:
        if set(prices) - {""}:
            why = "prices by name are for several machines"
            raise ConfigError("--price", arguments.price, why=why, remedy="one number, or --machine h100,h200")
        arguments.price = prices.get("")
        if arguments.deadline is not None:
            why = "the number of nodes that meets it is found only when machines are compared"
            raise ConfigError("--deadline", arguments.deadline, why=why, remedy="--machine h100,h200, or all")
    for name in ("search", "calibrate", "score", "timeline", "processes"):
        if several and getattr(arguments, name):
            why = f"--{name} is for one machine"
            raise ConfigError("--machine", arguments.machine, why=why, remedy=f"one machine, or leave out --{name}")
    if several and arguments.deadline is not None and arguments.nodes is not None:
        why = "with a deadline the number of nodes is the result"
        raise ConfigError("--nodes", arguments.nodes, why=why, remedy="give one of the two")
    if not 0 <= arguments.memory_margin < 1:
        why = "it is a share of a device's memory"
        raise ConfigError("--memory-margin", arguments.memory_margin, why=why, remedy="e.g. --memory-margin 0.1")


def _check_timeline(arguments: argparse.Namespace) -> None:
    file = arguments.timeline
    for other in ("search", "calibrate", "score"):
        if getattr(arguments, other):
            why = f"it draws the step of one plan, and --{other} makes none"
            raise ConfigError("--timeline", file, why=why, remedy=f"leave out --{other}")
    path = Path(file)
    if path.suffix not in (".html", ".svg", ".json"):
        why = "the extension chooses the format: .html, .svg (drawing) or .json (Chrome trace)"
        raise ConfigError("--timeline", file, why=why, remedy="e.g. --timeline step.html")
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ConfigError("--timeline", file, why=why, remedy="a file in a directory that exists")


def _check_score(arguments: argparse.Namespace) -> None:
    if arguments.score and not arguments.runs:
        raise ConfigError("--score", why="it names no run", remedy="headrace plan --score runs/a runs/b")
    if not arguments.score and arguments.runs:
        raise ConfigError("RUN", arguments.runs[0], why="only --score takes runs", remedy="--score, or --config FILE")
    if not arguments.score and arguments.save_calibration is not None:
        why = "it is made from scored runs"
        raise ConfigError("--save-calibration", arguments.save_calibration, why=why, remedy="--score RUN...")
