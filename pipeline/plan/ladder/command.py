"""`headrace ladder --config F`: predicts the held-out loss of a large run from a ladder of small ones."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.cli import add_config_arguments
from foundation.configfile import load
from foundation.errors import EXIT_USAGE, ConfigError
from foundation.lock import lock_file
from foundation.paths import LOCAL, is_url

if TYPE_CHECKING:
    from pipeline.config.sections.run import RunSection
    from pipeline.plan.ladder.plan import Ladder, Options

_LOCK = ".lock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument(
        "--output", metavar="DIR", type=LOCAL, help="directory of all runs and results (default: run.dir + -ladder)"
    )
    parser.add_argument("--rungs", type=int, default=4, metavar="N", help="model sizes (default: %(default)s)")
    text = "parameters of the smallest rung, as a share of the large model's (default: 1/32)"
    parser.add_argument("--smallest", type=float, default=1 / 32, metavar="SHARE", help=text)
    text = "parameters of the largest rung, as a share of the large model's (default: 1/8)"
    parser.add_argument("--largest", type=float, default=1 / 8, metavar="SHARE", help=text)
    text = "tokens of each rung's runs, as multiples of the large run's tokens per parameter (default: %(default)s)"
    parser.add_argument("--budgets", default="0.5,1,2", metavar="X,X", help=text)
    text = "learning rates of the sweep on the smallest rung, each twice the one before; 1: none (default: %(default)s)"
    parser.add_argument("--learning-rates", type=int, default=5, metavar="N", help=text)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each size and budget (default: 1)")
    text = "largest relative error of the loss, on rungs left out, with which a fit is used (default: %(default)s)"
    parser.add_argument("--tolerance", type=float, default=0.02, metavar="SHARE", help=text)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes of each run (default: 1)")
    text = "submit the runs to Slurm as job arrays, and the fit after them (slurm/pipeline.sbatch)"
    parser.add_argument("--slurm", action="store_true", help=text)
    # work of one job of --slurm
    parser.add_argument("--phase", choices=("sweep", "extend", "runs", "fit"), help=argparse.SUPPRESS)
    parser.add_argument("--laws", action="store_true", help="print what published laws suggest for the config, and end")
    parser.add_argument("--plan", action="store_true", help="print the runs and what they cost, and end")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Plans a ladder, trains the runs that are not finished, fits a law and predicts.

    Returns:
        0; 2 where the fit is too poor to be used; else the exit code of a run that failed or was stopped.

    Raises:
        ConfigError, DataError: the config or an option is refused, before any work.
    """
    _check(arguments)
    from pipeline.plan.ladder.large_run import read_large_run  # noqa: PLC0415  (brings in torch)
    from pipeline.plan.ladder.plan import plan_ladder  # noqa: PLC0415
    from pipeline.plan.ladder.slurm import element, submit  # noqa: PLC0415
    from pipeline.plan.ladder.text import laws_lines, plan_lines  # noqa: PLC0415

    large = read_large_run(load(arguments.config, arguments.overrides))
    if arguments.laws:
        print("\n".join(laws_lines(large.training)))
        return 0
    output = _output_of(arguments.output, large.run.config.run)
    ladder = plan_ladder(large, _options(arguments), output)
    if not arguments.json:
        print("\n".join(plan_lines(ladder)), flush=True)
    if arguments.plan:
        return 0
    output.mkdir(parents=True, exist_ok=True)
    if arguments.slurm:
        submit(ladder, _words(arguments), say=print)
        return 0
    number = element()
    with lock_file(output / _LOCK, doing=f"training a ladder in {output}", shared=number is not None):
        if arguments.phase in ("sweep", "runs") and number is not None:
            return _train_element(ladder, arguments, number)
        return _train_and_fit(ladder, arguments)


def _train_and_fit(ladder: Ladder, arguments: argparse.Namespace) -> int:
    from pipeline.plan.ladder.learning_rate import sweep  # noqa: PLC0415
    from pipeline.plan.ladder.results import as_json, evaluate, write_results  # noqa: PLC0415
    from pipeline.plan.ladder.runs import done_of, train_all  # noqa: PLC0415
    from pipeline.plan.ladder.text import outcome_lines  # noqa: PLC0415

    say = (lambda _line: None) if arguments.json else partial(print, flush=True)
    train = partial(train_all, ladder, jobs=arguments.jobs, nproc=arguments.nproc, say=say)
    chosen, code = sweep(ladder, train)
    if chosen is None or arguments.phase == "extend":
        return code
    runs = ladder.runs(chosen.factor)
    code = train(runs)
    if code:
        return code
    outcome = evaluate(ladder, done_of(ladder, runs), chosen, tolerance=arguments.tolerance)
    write_results(outcome)
    print(json.dumps(as_json(outcome)) if arguments.json else "\n".join(outcome_lines(outcome)))
    return 0 if outcome.verdict.prediction is not None else EXIT_USAGE


def _train_element(ladder: Ladder, arguments: argparse.Namespace, number: int) -> int:
    """Trains one run of a job array."""
    from pipeline.plan.ladder.learning_rate import chosen_before  # noqa: PLC0415
    from pipeline.plan.ladder.runs import train_all  # noqa: PLC0415

    runs = ladder.sweep() if arguments.phase == "sweep" else ladder.runs(chosen_before(ladder).factor)
    if number >= len(runs):
        remedy = f"--array=0-{len(runs) - 1}"
        raise ConfigError("--array", number, why=f"there are {len(runs)} runs in this phase", remedy=remedy)
    return train_all(ladder, [runs[number]], jobs=1, nproc=arguments.nproc, say=partial(print, flush=True))


def _output_of(given: str | None, run: RunSection) -> Path:
    """The directory of all runs and results, by default beside the large run's.

    Raises:
        ConfigError: no directory is given, and run.dir is a URL.
    """
    if given is None and is_url(run.dir):
        raise ConfigError("--output", why=f"run.dir is a URL, {run.dir}", remedy="--output DIR, a path")
    return Path(given or f"{run.dir}-ladder")


def _words(arguments: argparse.Namespace) -> list[str]:
    """The arguments of this command that its jobs repeat."""
    sets = [word for text in arguments.overrides for word in ("--set", text)]
    output = ["--output", arguments.output] if arguments.output else []
    names = ("rungs", "smallest", "largest", "budgets", "learning_rates", "seeds", "tolerance", "nproc")
    own = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
    return ["--config", arguments.config, *sets, *output, *own]


def _options(arguments: argparse.Namespace) -> Options:
    from pipeline.plan.ladder.plan import Options  # noqa: PLC0415

    return Options(
        rungs=arguments.rungs,
        smallest=arguments.smallest,
        largest=arguments.largest,
        budgets=_budgets(arguments.budgets),
        learning_rates=arguments.learning_rates,
        seeds=arguments.seeds,
    )


def _budgets(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(word) for word in text.split(",")}))
    except ValueError:
        raise ConfigError("--budgets", text, why="it is no list of numbers", remedy="use 0.5,1,2") from None


def _check(arguments: argparse.Namespace) -> None:
    for name in ("jobs", "nproc"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name}", getattr(arguments, name), why="it is a number of processes", remedy="1")
    if arguments.tolerance <= 0:
        raise ConfigError("--tolerance", arguments.tolerance, why="no fit is exact", remedy="0.02")
