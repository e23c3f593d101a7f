"""`headrace goodput`: goodput expected under failures, the best checkpoint interval, and measurements of runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.paths import RUN
from pipeline.runtime.goodput.failures.model import (
    DAY,
    HOUR,
    FailureModel,
    daly_interval_s,
    expected_goodput,
    with_best_interval,
)
from pipeline.runtime.goodput.failures.simulation import GoodputGain, Simulated, sensitivity, simulate
from pipeline.runtime.goodput.measured import MeasuredGoodput, inputs_of, kept_share, read_measured
from pipeline.runtime.goodput.text import goodput_text
from pipeline.runtime.metrics.times import clock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments: one per field of `FailureModel`."""
    for field in fields(FailureModel):
        kind = int if isinstance(field.default, int) else float
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=kind, metavar="N", help=field.metadata["meaning"])
    text = "compare with this run's measurements, and use them for options that are not given (repeatable)"
    parser.add_argument("--run", action="append", default=[], metavar="RUN", type=RUN, help=text)
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="simulated runs (default: 200)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Simulates runs under failures and prints their goodput."""
    if arguments.seeds < 2:
        remedy = "use 2 or more, 200 for a narrow interval"
        raise ConfigError("--seeds", arguments.seeds, why="an interval needs two runs", remedy=remedy)
    runs = [read_measured(Path(path)) for path in arguments.run]
    options = {field.name: getattr(arguments, field.name) for field in fields(FailureModel)}
    given = (inputs_of(runs) if runs else {}) | {name: value for name, value in options.items() if value is not None}
    auto = "interval_s" not in given
    # a first interval longer than any save
    first = {"interval_s": max(given.get("save_s", FailureModel.save_s), 1.0)} if auto else {}
    model = FailureModel(**given, **first)
    model = with_best_interval(model) if auto else model
    seeds = range(arguments.seeds)
    found, gains = simulate(model, seeds=seeds), sensitivity(model, seeds=seeds)
    if arguments.json:
        print(json.dumps({**_plain(model, found, gains), **({"measured": _measured(runs)} if runs else {})}))
        return 0
    for line in _measured_lines(runs, found):
        print(line)
    for line in _lines(model, found, gains, auto=auto):
        print(line)
    return 0


def _lines(model: FailureModel, found: Simulated, gains: Sequence[GoodputGain], *, auto: bool) -> Iterator[str]:
    best = daly_interval_s(mtbf_s=model.mtbf_s, blocking_s=model.save_blocking_s)
    which = "chosen" if auto else "given"
    yield _line("cluster", f"{model.nodes:,} nodes, {model.nodes * model.gpus_per_node:,} GPUs, {model.spares} spares")
    failures = sum(found.failures) / len(found.failures)
    often = f"one in {model.mtbf_s / HOUR:.2f} h ({model.node_mtbf_s / DAY:.0f} days per node)"
    yield _line("failures", f"{often}; {failures:.0f} in {model.days:g} days")
    yield _line("restart", f"{model.restart_s:g} s from a failure to the next step")
    yield _line(
        "interval",
        f"{model.interval_s:.0f} s ({which}); the best by Daly is {best:.0f} s, a save takes {model.save_s:g} s",
    )
    runs = (
        f"95 % interval of the mean, {len(found.times)} runs;"
        f" 90 % of the runs {found.percentile(0.05):.2%} to {found.percentile(0.95):.2%}"
    )
    yield _line("goodput", f"{found.mean:.2%} +- {found.half_width:.2%} ({runs})")
    yield _line("formula", f"{expected_goodput(model):.2%} with all nodes at all times (Daly 2006)")
    shares = found.time_shares()
    yield _line("time", ", ".join(f"{name} {share:.2%}" for name, share in shares.items()))
    yield _line("what matters", "points of goodput, simulated (formula)")
    for gain in gains:
        yield f"{gain.change:>24} {gain.value:>12,.0f}   {100 * gain.simulated:+.3f} ({100 * gain.formula:+.3f})"


def _measured_lines(runs: Sequence[MeasuredGoodput], found: Simulated) -> Iterator[str]:
    """Yields each run's goodput; then that of all together, beside the one predicted from their failures and times."""
    if not runs:
        return
    for run in runs:
        yield _line("run", f"{run.path}: goodput {goodput_text(run.goodput)}")
    wall, crashes = sum(run.seconds for run in runs), sum(run.crashes for run in runs)
    often = f"one in {clock(wall / crashes)}" if crashes else "none: the published rate is taken"
    yield _line("crashes", f"{crashes} in {clock(wall)}, {often}")
    what = "steps kept, of these and what restarts and checkpoints took"
    yield _line("measured", f"{kept_share(runs):.2%} ({what})")
    low, high = found.percentile(0.05), found.percentile(0.95)
    yield _line("predicted", f"{found.mean:.2%} (90 % of simulated runs {low:.2%} to {high:.2%})")


def _measured(runs: Sequence[MeasuredGoodput]) -> dict[str, Any]:
    rows = [{"run": str(run.path), "crashes": run.crashes, **run.goodput.row()} for run in runs]
    return {"runs": rows, "kept_share": kept_share(runs)}


def _plain(model: FailureModel, found: Simulated, gains: Sequence[GoodputGain]) -> dict[str, Any]:
    return {
        "inputs": asdict(model),
        "goodput": {
            "mean": found.mean,
            "half_width": found.half_width,
            "low": found.percentile(0.05),
            "high": found.percentile(0.95),
        },
        "formula": expected_goodput(model),
        "daly_interval_s": daly_interval_s(mtbf_s=model.mtbf_s, blocking_s=model.save_blocking_s),
        "time": found.time_shares(),
        "sensitivity": [asdict(gain) for gain in gains],
    }


def _line(label: str, text: str) -> str:
    return f"{label:>14}  {text}"
