"""`headrace ladder --coordinate-check` and `--rate-check`: do learning rates transfer between the sizes of a config?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.base.directory import write_text
from headrace.base.errors import ConfigError
from headrace.base.paths import is_url

if TYPE_CHECKING:
    from pipeline.config.sections.run import Config, RunSection
    from pipeline.plan.ladder.coordinate_check.sizes import Grid

Number = TypeVar("Number", int, float)
COORDINATES, RATES = "coordinate_check", "rate_check"
_WIDTHS = {COORDINATES: "64,128,256,512", RATES: "64,256"}
_DEPTHS = {COORDINATES: "2,4,8", RATES: ""}
_STEPS = {COORDINATES: 10, RATES: 200}
_STEP_TOKENS = 4096
_BOTH = (COORDINATES, RATES)
_OPTIONS: dict[str, tuple[str, ...]] = {
    "widths": _BOTH,
    "depths": _BOTH,
    "steps": _BOTH,
    "step_tokens": (COORDINATES,),
    "rates": (RATES,),
}
_OTHERS = ("laws", "plan", "slurm", "phase")


def add_coordinate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of both checks, in a group of their own."""
    group = parser.add_argument_group("Coordinate check")
    text = (
        "compare how far training moves activations at several widths and depths, under CompleteP and the standard"
        f" parametrization; write {COORDINATES}.json and .svg to --output, and end (--seeds: runs of each size)"
    )
    group.add_argument("--coordinate-check", action="store_true", help=text)
    text = (
        "train several widths and depths at each of --rates, under both parametrizations, and compare the best learning"
        f" rates; write {RATES}.json and .svg to --output, and end (--seeds: runs of each size and rate)"
    )
    group.add_argument("--rate-check", action="store_true", help=text)
    text = f"hidden sizes, at the base model's depth (default: {_WIDTHS[COORDINATES]}; of rates {_WIDTHS[RATES]})"
    group.add_argument("--widths", metavar="N,N", help=text)
    text = f"decoder layers, at the base model's width (default: {_DEPTHS[COORDINATES]}; of rates none)"
    group.add_argument("--depths", metavar="N,N", help=text)
    text = f"steps of each run (default: {_STEPS[COORDINATES]}; of rates {_STEPS[RATES]}, with the config's schedule)"
    group.add_argument("--steps", type=int, metavar="N", help=text)
    text = f"tokens of each step of the coordinate check, at least (default: {_STEP_TOKENS})"
    group.add_argument("--step-tokens", type=int, metavar="N", help=text)
    group.add_argument("--rates", metavar="LR,LR", help="peak learning rates of the rate check")


def check_coordinate_arguments(arguments: argparse.Namespace) -> None:
    """Refuses options that do not go together.

    Raises:
        ConfigError: an option of a check without it, or a check with another mode of the command.
    """
    chosen = [name for name in _BOTH if getattr(arguments, name)]
    others = [name for name in (*chosen[1:], *_OTHERS) if getattr(arguments, name)] if chosen else []
    for name in others:
        why = f"--{_flag(chosen[0])} runs alone, in this process"
        raise ConfigError(f"--{_flag(name)}", getattr(arguments, name), why=why, remedy="give one of the two")
    for name, checks in _OPTIONS.items():
        if getattr(arguments, name) is not None and not {*chosen} & {*checks}:
            flags = " or ".join(f"--{_flag(each)}" for each in checks)
            why = f"it is an option of {flags}"
            raise ConfigError(f"--{_flag(name)}", getattr(arguments, name), why=why, remedy=f"add {flags}")
    if arguments.rate_check and arguments.rates is None:
        raise ConfigError("--rates", why="--rate-check needs them", remedy="--rates 1e-3,2e-3,4e-3,8e-3")


def run_check(arguments: argparse.Namespace) -> int:
    """Runs the check that was asked for; returns the exit code."""
    return _coordinate_check(arguments) if arguments.coordinate_check else _rate_check(arguments)


def _coordinate_check(arguments: argparse.Namespace) -> int:
    """Trains all sizes for a few steps on the CPU, prints slopes, and writes figures and a picture.

    Returns:
        0; 1 where a line of CompleteP is not flat.

    Raises:
        ConfigError: the config or an option is refused, before any run is trained.
        TrainingError: a run has a non-finite loss.
    """
    from pipeline.plan.ladder.coordinate_check.check import coordinate_check  # noqa: PLC0415  (brings in torch)
    from pipeline.plan.ladder.coordinate_check.picture import save_coordinates  # noqa: PLC0415
    from pipeline.plan.ladder.coordinate_check.text import as_json, text_lines, uneven  # noqa: PLC0415

    common = _common(arguments, COORDINATES)
    tokens = _at_least_one("step_tokens", _STEP_TOKENS if arguments.step_tokens is None else arguments.step_tokens)
    config, grid, output = _read(arguments, COORDINATES)
    lines = coordinate_check(config, grid, step_tokens=tokens, **common)
    _write(output / f"{COORDINATES}.json", as_json(lines))
    save_coordinates(lines, output / f"{COORDINATES}.svg")
    print(json.dumps(as_json(lines)) if arguments.json else "\n".join(text_lines(lines)))
    return 1 if uneven(lines) else 0


def _rate_check(arguments: argparse.Namespace) -> int:
    """Trains all sizes at all rates on the CPU, prints the best of each, and writes figures and a picture.

    Raises:
        ConfigError: the config or an option is refused, before any run is trained.
    """
    from pipeline.plan.ladder.coordinate_check.picture import save_rates  # noqa: PLC0415  (brings in torch)
    from pipeline.plan.ladder.coordinate_check.rates import sweep  # noqa: PLC0415
    from pipeline.plan.ladder.coordinate_check.text import sweep_lines, sweeps_json  # noqa: PLC0415

    common = _common(arguments, RATES)
    rates = _numbers("rates", arguments.rates, float, "1e-3,2e-3,4e-3")
    config, grid, output = _read(arguments, RATES)
    sweeps = sweep(config, grid=grid, rates=rates, **common)
    _write(output / f"{RATES}.json", sweeps_json(sweeps))
    save_rates(sweeps, output / f"{RATES}.svg")
    print(json.dumps(sweeps_json(sweeps)) if arguments.json else "\n".join(sweep_lines(sweeps)))
    return 0


def _common(arguments: argparse.Namespace, check: str) -> dict[str, Any]:
    """Arguments of both checks: steps, seeds and the function that reports progress."""
    report: Callable[[str], None] = (lambda _line: None) if arguments.json else partial(print, flush=True)
    steps = _at_least_one("steps", _STEPS[check] if arguments.steps is None else arguments.steps)
    return {"steps": steps, "seeds": _at_least_one("seeds", arguments.seeds), "report": report}


def _read(arguments: argparse.Namespace, check: str) -> tuple[Config, Grid, Path]:
    """The config, the sizes, and the directory of the results."""
    from pipeline.config.load import load_config  # noqa: PLC0415
    from pipeline.plan.ladder.coordinate_check.sizes import Grid  # noqa: PLC0415

    widths = _WIDTHS[check] if arguments.widths is None else arguments.widths
    depths = _DEPTHS[check] if arguments.depths is None else arguments.depths
    grid = Grid(_numbers("widths", widths, int, "64,256"), _numbers("depths", depths, int, "2,4,8") if depths else ())
    config = load_config(arguments.config, arguments.overrides)
    return config, grid, output_of(arguments.output, config.run)


def output_of(given: str | None, run: RunSection) -> Path:
    """The directory of all runs and results, by default beside the run's.

    Raises:
        ConfigError: no directory is given, and run.dir is a URL.
    """
    if given is None and is_url(run.dir):
        raise ConfigError("--output", why=f"run.dir is a URL, {run.dir}", remedy="--output DIR, a path")
    return Path(given or f"{run.dir}-ladder")


def _write(path: Path, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(figures, indent=1) + "\n")


def _numbers(name: str, text: str, kind: Callable[[str], Number], example: str) -> tuple[Number, ...]:
    try:
        found = tuple(sorted({kind(word) for word in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not found[0] > 0:
        why = "it is no list of numbers above 0, with commas between them"
        raise ConfigError(f"--{name}", text, why=why, remedy=f"--{name} {example}")
    return found


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"--{_flag(name)}", value, why="it is below 1", remedy=f"e.g. --{_flag(name)} 3")
    return value


def _flag(name: str) -> str:
    return name.replace("_", "-")
