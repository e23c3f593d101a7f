"""Trains a model: `deepspeed pipeline/train.py --config ds_configs/zero3.json`, or torchrun, srun or plain python."""

from __future__ import annotations

import argparse

from foundation.cli import guarded, leave
from foundation.errors import ConfigError
from foundation.quick_imports import quick_imports
from pipeline.run.same_run import refuse_before_start
from pipeline.runtime.faults.stop_signals import StopSignals
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.arguments import add_arguments, parse_arguments, resolve_run

__all__ = ["add_arguments", "main", "run"]


def main() -> int:
    """Entry point."""
    return run(parse_arguments("Train a language model. Goes on from the newest checkpoint of run.dir by itself."))


def run(arguments: argparse.Namespace) -> int:
    """Trains the model; returns the exit code."""
    resolved = resolve_run(arguments, check=refuse_before_start)
    if resolved.config.distill is not None:
        remedy = "start pipeline/distill.py with this config, or remove the section"
        raise ConfigError("distill", why="train.py has no teacher", remedy=remedy)
    # torch takes seconds to import, and an invalid config is refused without waiting for it
    with StopSignals(announce=detect().rank == 0) as signals:
        with quick_imports():
            from pipeline.engines.parallel.multi_token import training_loss  # noqa: PLC0415
            from pipeline.run.session import train  # noqa: PLC0415

        return train(resolved, lambda run, *_rank: training_loss(run.run.config.loss), signals=signals)


if __name__ == "__main__":
    leave(guarded(main))
