"""`python -m pipeline.plan.ladder.coordinate_check COMMAND --config FILE`: do learning rates transfer?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headrace.base.cli import add_config_arguments, guarded, leave
from headrace.base.directory import write_text
from pipeline.config.load import load_config
from pipeline.plan.ladder.coordinate_check.check import STEP_TOKENS, coordinate_check
from pipeline.plan.ladder.coordinate_check.picture import save_coordinates, save_rates
from pipeline.plan.ladder.coordinate_check.rates import sweep
from pipeline.plan.ladder.coordinate_check.sizes import Grid
from pipeline.plan.ladder.coordinate_check.text import as_json, sweep_lines, sweeps_json, text_lines, uneven


def run_check(arguments: argparse.Namespace) -> int:
    """Runs the coordinate check; 1 where a line of CompleteP is not flat."""
    config = load_config(arguments.config, arguments.overrides)
    grid = Grid(tuple(arguments.widths), tuple(arguments.depths))
    length = {"steps": arguments.steps, "step_tokens": arguments.step_tokens}
    lines = coordinate_check(config, grid, **length, seeds=arguments.seeds, report=_progress)
    print("\n".join(text_lines(lines)))
    _write(arguments.output, as_json(lines))
    if arguments.picture:
        save_coordinates(lines, arguments.picture)
    return 1 if uneven(lines) else 0


def run_rates(arguments: argparse.Namespace) -> int:
    """Runs the sweep of the learning rate."""
    config = load_config(arguments.config, arguments.overrides)
    sweeps = sweep(
        config,
        grid=Grid(tuple(arguments.widths), tuple(arguments.depths)),
        rates=arguments.rates,
        steps=arguments.steps,
        seeds=arguments.seeds,
        report=_progress,
    )
    print("\n".join(sweep_lines(sweeps)))
    _write(arguments.output, sweeps_json(sweeps))
    if arguments.picture:
        save_rates(sweeps, arguments.picture)
    return 0


def main() -> int:
    """Parses the command line and runs the command."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.plan.ladder.coordinate_check", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="how far training moves activations, over width and depth")
    rates = commands.add_parser("rates", help="the best learning rate of several widths and depths")
    for each in (check, rates):
        add_config_arguments(each)
        each.add_argument("--seeds", type=_count, default=1, metavar="N", help="runs of each size (default: 1)")
        each.add_argument("--output", type=Path, metavar="OUT.json", help="write the figures as JSON, too")
        each.add_argument("--picture", type=Path, metavar="OUT.svg", help="draw them")
    check.add_argument("--widths", type=_count, nargs="+", default=[64, 128, 256, 512], metavar="N")
    check.add_argument("--depths", type=_count, nargs="+", default=[2, 4, 8], metavar="N")
    check.add_argument("--steps", type=_count, default=10, metavar="N", help="of each run (default: 10)")
    text = "of each step, at least (default: %(default)s)"
    check.add_argument("--step-tokens", type=_count, default=STEP_TOKENS, metavar="N", help=text)
    rates.add_argument("--widths", type=_count, nargs="+", default=[64, 256], metavar="N")
    rates.add_argument("--depths", type=_count, nargs="*", default=[], metavar="N")
    rates.add_argument("--rates", type=float, nargs="+", required=True, metavar="LR", help="peak learning rates")
    rates.add_argument("--steps", type=_count, required=True, metavar="N", help="of each run")
    arguments = parser.parse_args()
    return run_check(arguments) if arguments.command == "check" else run_rates(arguments)


def _write(path: Path | None, figures: dict[str, object]) -> None:
    if path is not None:
        write_text(path, json.dumps(figures, indent=1) + "\n")


def _progress(text: str) -> None:
    print(text, flush=True)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


if __name__ == "__main__":
    leave(guarded(main))
