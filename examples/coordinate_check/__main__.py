"""Checks whether a CompleteP config transfers between model sizes (docs/how-to/parametrization.md).

    python -m examples.coordinate_check coordinates --config FILE [--widths 64,128] [--depths 2,4] [--step-tokens 4096]
    python -m examples.coordinate_check rates --config FILE --rates 1e-3,2e-3,4e-3 [--widths 64,256] [--steps 200]

`coordinates` trains several widths and depths for a few steps and compares how far activations move. `rates` trains
them at several learning rates and compares the best ones. Both train under CompleteP and the standard parametrization,
in one process on the CPU, and write figures and a picture to `--output`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from examples.coordinate_check.check import STEP_TOKENS, coordinate_check
from examples.coordinate_check.picture import save_coordinates, save_rates
from examples.coordinate_check.rates import sweep
from examples.coordinate_check.sizes import Grid
from examples.coordinate_check.text import as_json, sweep_lines, sweeps_json, text_lines, uneven
from foundation.cli import add_config_arguments, guarded
from foundation.directory import write_text
from pipeline.config.load import load_config

Number = TypeVar("Number", int, float)


def main(words: Sequence[str] | None = None) -> int:
    """Trains all sizes, and prints and writes the results.

    Returns:
        0; 1 if a line of CompleteP is not flat.

    Raises:
        ConfigError: the config or an option is refused, before any run is trained.
        TrainingError: a run of `coordinates` has a non-finite loss.
    """
    arguments = _parser().parse_args(words)
    config = load_config(arguments.config, arguments.overrides)
    grid = Grid(arguments.widths, arguments.depths)
    common: dict[str, Any] = {"steps": arguments.steps, "seeds": arguments.seeds, "report": partial(print, flush=True)}
    if arguments.check == "rates":
        sweeps = sweep(config, grid=grid, rates=arguments.rates, **common)
        figures, lines, draw, code = sweeps_json(sweeps), sweep_lines(sweeps), partial(save_rates, sweeps), 0
    else:
        changes = coordinate_check(config, grid, step_tokens=arguments.step_tokens, **common)
        figures, lines, draw = as_json(changes), text_lines(changes), partial(save_coordinates, changes)
        code = 1 if uneven(changes) else 0
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / f"{arguments.check}.json", json.dumps(figures, indent=1) + "\n")
    draw(output / f"{arguments.check}.svg")
    print("\n".join(lines))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checks = parser.add_subparsers(dest="check", required=True)
    coordinates = checks.add_parser("coordinates", help="compare how far training moves activations")
    _add_common(coordinates, widths=(64, 128, 256, 512), depths=(2, 4, 8), steps=10)
    coordinates.add_argument("--step-tokens", type=_count, default=STEP_TOKENS, help="fewest tokens of each step")
    rates = checks.add_parser("rates", help="compare the best learning rates")
    _add_common(rates, widths=(64, 256), depths=(), steps=200)
    rates.add_argument("--rates", type=_list_of(float), required=True, metavar="LR,LR", help="peak learning rates")
    return parser


def _add_common(
    parser: argparse.ArgumentParser, *, widths: tuple[int, ...], depths: tuple[int, ...], steps: int
) -> None:
    add_config_arguments(parser)
    text = f"hidden sizes, at the base model's depth (default: {widths})"
    parser.add_argument("--widths", type=_list_of(int), default=widths, metavar="N,N", help=text)
    text = f"decoder layers, at the base model's width (default: {depths})"
    parser.add_argument("--depths", type=_list_of(int), default=depths, metavar="N,N", help=text)
    parser.add_argument("--steps", type=_count, default=steps, help="steps of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=_count, default=1, help="runs of each size (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("out/coordinate-check"), help="folder of the results")


def _list_of(kind: Callable[[str], Number]) -> Callable[[str], tuple[Number, ...]]:
    def parse(text: str) -> tuple[Number, ...]:
        try:
            found = tuple(kind(word) for word in text.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < each < math.inf for each in found):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers above 0, with commas between them")
        return found

    return parse


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(guarded(main))
