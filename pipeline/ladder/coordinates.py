"""`headrace ladder --coordinate-check`: do learning rate and weight decay transfer between the sizes of a config?"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from headrace.base.directory import write_text
from headrace.base.errors import ConfigError

FIGURES, PICTURE = "coordinate_check.json", "coordinate_check.svg"
_SIZES = {"widths": "64,128,256,512", "depths": "2,4,8"}
_STEPS = 10
_OTHERS = ("laws", "plan", "slurm", "phase")


def add_coordinate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the coordinate check, in a group of their own."""
    group = parser.add_argument_group("Coordinate check")
    text = (
        "compare how far training moves activations at several widths and depths, under CompleteP and the standard"
        f" parametrization; write {FIGURES} and {PICTURE} to --output, and end (--seeds: runs of each size)"
    )
    group.add_argument("--coordinate-check", action="store_true", help=text)
    text = f"hidden sizes, at the base model's depth (default: {_SIZES['widths']})"
    group.add_argument("--widths", metavar="N,N", help=text)
    text = f"decoder layers, at the base model's width (default: {_SIZES['depths']})"
    group.add_argument("--depths", metavar="N,N", help=text)
    group.add_argument("--steps", type=int, metavar="N", help=f"steps of each run (default: {_STEPS})")


def check_coordinate_arguments(arguments: argparse.Namespace) -> None:
    """Refuses options that do not go together.

    Raises:
        ConfigError: an option of the check without it, or the check with another mode of the command.
    """
    if arguments.coordinate_check:
        for name in _OTHERS:
            if getattr(arguments, name):
                why = "the coordinate check runs alone, in this process"
                raise ConfigError(f"--{name}", getattr(arguments, name), why=why, remedy="give one of the two")
        return
    for name in (*_SIZES, "steps"):
        if getattr(arguments, name) is not None:
            why = "it is an option of the coordinate check"
            raise ConfigError(f"--{name}", getattr(arguments, name), why=why, remedy="add --coordinate-check")


def run_coordinate_check(arguments: argparse.Namespace) -> int:
    """Trains all sizes for a few steps on the CPU, prints slopes, and writes figures and a picture.

    Returns:
        0; 1 where a line of CompleteP is not flat.

    Raises:
        ConfigError: before any run is trained.
        TrainingError: a run has a non-finite loss.
    """
    from pipeline.config.load import load_config  # noqa: PLC0415
    from pipeline.coordinate_check.check import coordinate_check  # noqa: PLC0415  (brings in torch)
    from pipeline.coordinate_check.picture import save_coordinates  # noqa: PLC0415
    from pipeline.coordinate_check.sizes import Grid  # noqa: PLC0415
    from pipeline.coordinate_check.text import as_json, text_lines, uneven  # noqa: PLC0415

    steps = _STEPS if arguments.steps is None else arguments.steps
    grid = Grid(_sizes("widths", arguments.widths), _sizes("depths", arguments.depths))
    for name, value in (("steps", steps), ("seeds", arguments.seeds)):
        if value < 1:
            raise ConfigError(f"--{name}", value, why="it is below 1", remedy=f"e.g. --{name} 3")
    config = load_config(arguments.config, arguments.overrides)
    output = Path(arguments.output or f"{config.run.dir}-ladder")
    report = (lambda _line: None) if arguments.json else partial(print, flush=True)
    lines = coordinate_check(config, grid, steps=steps, seeds=arguments.seeds, report=report)
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / FIGURES, json.dumps(as_json(lines), indent=1) + "\n")
    save_coordinates(lines, output / PICTURE)
    print(json.dumps(as_json(lines)) if arguments.json else "\n".join(text_lines(lines)))
    return 1 if uneven(lines) else 0


def _sizes(name: str, given: str | None) -> tuple[int, ...]:
    text = _SIZES[name] if given is None else given
    try:
        sizes = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        sizes = (0,)
    if sizes[0] < 1:
        why = "it is no list of numbers above 0, with commas between them"
        raise ConfigError(f"--{name}", text, why=why, remedy=f"--{name} {_SIZES[name]}")
    return sizes
