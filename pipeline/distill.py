"""Knowledge distillation from a teacher to a student: `deepspeed pipeline/distill.py --config CONFIG`."""

from __future__ import annotations

import argparse

from foundation.cli import guarded, leave
from foundation.errors import ConfigError
from foundation.quick_imports import quick_imports
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.config.sections.run import Config
from pipeline.run.distillation.control import SUFFIX, comparison, control_of
from pipeline.run.same_run import refuse_before_start
from pipeline.runtime.faults.stop_signals import StopSignals
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.arguments import add_arguments as add_run_arguments
from pipeline.runtime.launch.arguments import resolve_run

__all__ = ["add_arguments", "main", "run"]


def main() -> int:
    """Entry point."""
    text = "Train a student model by distillation from a frozen teacher. Same loop, engines and config as train.py."
    parser = argparse.ArgumentParser(description=text, allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of training, and `--control`."""
    add_run_arguments(parser)
    text = "the same run on cross-entropy alone, without a teacher, into RUN.DIR-control, to measure the teacher's gain"
    parser.add_argument("--control", action="store_true", help=text)


def _unchanged(config: Config) -> Config:
    return config


def run(arguments: argparse.Namespace) -> int:
    """Distils the student, or trains the control; returns the exit code."""
    change = control_of if arguments.control else _unchanged
    resolved = resolve_run(arguments, change=change, check=refuse_before_start)
    if resolved.config.distill is None and not arguments.control:
        remedy = 'add "distill": {"teacher": "out/models/teacher"}, or use pipeline/train.py'
        raise ConfigError("distill", why="the config has no teacher", remedy=remedy)
    first = detect().rank == 0
    code = _train(resolved, first=first)
    run_dir = resolved.config.run.dir
    line = comparison(run_dir.removesuffix(SUFFIX) if arguments.control else run_dir)
    if first and code == 0 and line is not None:
        print(line, flush=True)
    return code


def _train(resolved: ResolvedRun, *, first: bool) -> int:
    # torch takes seconds to import, and an invalid config is refused without waiting for it
    with StopSignals(announce=first) as signals:
        with quick_imports():
            from pipeline.engines.parallel.multi_token import training_loss  # noqa: PLC0415
            from pipeline.run.distillation.on_rank import make_distillation  # noqa: PLC0415
            from pipeline.run.session import train  # noqa: PLC0415

        if resolved.config.distill is None:
            return train(resolved, lambda *_rank: training_loss(resolved.config.loss), signals=signals)
        return train(resolved, make_distillation, signals=signals)


if __name__ == "__main__":
    leave(guarded(main))
