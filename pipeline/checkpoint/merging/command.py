"""`headrace merge RUN... OUT`: a weighted mean of checkpoints, as the checkpoint of a new run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from foundation.command_line import Parser
from foundation.errors import ConfigError, DataError
from foundation.paths import PLACE, is_url
from pipeline.checkpoint.merging.coefficients import METHODS, SHAPES, MergeMethod

if TYPE_CHECKING:
    from pipeline.checkpoint.merging.merge import Merge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    if isinstance(parser, Parser):
        parser.intermixed = True
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=PLACE, help="a run or its URL, or one of its checkpoints as RUN@STEP"
    )
    parser.add_argument("out", metavar="OUT", type=PLACE, help="directory or URL of the new run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, metavar="N", help="the N newest checkpoints of every RUN without a step")
    which.add_argument(
        "--steps", type=_numbers(int), default=(), metavar="A,B,...", help="these checkpoints of every RUN without one"
    )
    text = (
        "mean (the default); ema over a run's checkpoints; wsm, which stands for a decay of a constant rate over them"
        " (arXiv:2507.17634); linear, with --weights"
    )
    parser.add_argument("--method", choices=METHODS, help=text)
    text = "weights of the checkpoints, run by run and by ascending step, with the sum 1; for method linear"
    parser.add_argument("--weights", type=_numbers(float), metavar="W,W,...", help=text)
    text = "shape of the decay of method wsm (default: linear, which is the mean of checkpoints at equal distances)"
    parser.add_argument("--shape", choices=tuple(SHAPES), help=text)
    text = "decay of method ema per checkpoint, e.g. 0.8 (default: 0.5)"
    parser.add_argument("--decay", type=float, metavar="D", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Merges, and prints what was merged with which weights.

    Raises:
        HeadraceError: the checkpoints cannot be merged, or the output cannot be written; before any work.
    """
    if arguments.last is not None and arguments.last < 1:
        raise ConfigError("--last", arguments.last, why="it is a number of checkpoints", remedy="use 1 or more")
    method = _method(arguments)
    # these import torch, which takes seconds: `--help` should not wait for it
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415

    from pipeline.checkpoint.export.find import RunPlace  # noqa: PLC0415
    from pipeline.checkpoint.merging.merge import Merge  # noqa: PLC0415
    from pipeline.checkpoint.merging.sources import choose, open_sources  # noqa: PLC0415
    from pipeline.checkpoint.new_run import free_run_dir, upload_run  # noqa: PLC0415

    out = arguments.out.rstrip("/")
    run_dir = free_run_dir(out)
    if run_dir.exists() and not is_url(out):
        raise DataError(f"{run_dir} exists already\n  try: another directory")
    chosen = choose([RunPlace.parse(each) for each in arguments.runs], last=arguments.last, steps=arguments.steps)
    merge = Merge.of(open_sources(chosen), method)
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("merging", total=None)
        written = merge.write(run_dir, lambda done, total: bar.update(task, completed=done, total=total))
    for line in _lines(merge):
        print(line)
    if is_url(out):
        upload_run(run_dir, out)
    print(f"output: {out}, step {written.step:,}; headrace export {out} MODEL writes its model")
    return 0


def _method(arguments: argparse.Namespace) -> MergeMethod:
    """Makes the method of the arguments; refuses options that it does not use."""
    name = arguments.method or ("linear" if arguments.weights else "mean")
    options = {"weights": ("linear", arguments.weights), "shape": ("wsm", arguments.shape)}
    for option, (owner, value) in {**options, "decay": ("ema", arguments.decay)}.items():
        if value is not None and name != owner:
            why = f"method {name} does not use it"
            raise ConfigError(f"--{option}", value, why=why, remedy=f"--method {owner}, or leave it out")
    if name == "linear" and not arguments.weights:
        why, remedy = "method linear needs the weights", "add --weights 0.5,0.5, or use --method mean"
        raise ConfigError("--weights", why=why, remedy=remedy)
    if arguments.decay is not None and not 0 < arguments.decay < 1:
        raise ConfigError("--decay", arguments.decay, why="it is a share of the average", remedy="e.g. 0.8")
    decay = {} if arguments.decay is None else {"ema": arguments.decay}
    return MergeMethod(name, arguments.weights or (), arguments.shape or "linear", **decay)


def _lines(merge: Merge) -> list[str]:
    """Formats a line for each checkpoint, and a warning of a rate that WSM's formula does not describe."""
    lines = [
        f"{coefficient:10.6f}  {source.name}"
        for source, coefficient in zip(merge.sources, merge.coefficients, strict=True)
    ]
    if merge.method.name == "wsm" and (rates := merge.rates()) is not None:
        text = f"between these checkpoints the rate went from {rates[0]:.3g} to {rates[1]:.3g}"
        lines.append(f"warning: {text}; WSM assumes a constant rate: the decay would come on top of this one")
    return lines


def _numbers(kind: type[int] | type[float]) -> Callable[[str], tuple[float, ...]]:
    """Makes the `type` of an argument that is a list of numbers."""

    def parse(text: str) -> tuple[float, ...]:
        return tuple(kind(each) for each in text.split(","))

    parse.__name__ = "numbers, separated by commas,"
    return parse
