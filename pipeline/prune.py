"""`python pipeline/prune.py --config F`: structured pruning of a trained model, in width, depth and experts.

model/ -> model-pruned/: activations are measured on calibration windows, the least important channels, heads, experts
and layers are cut out, the result is written beside its final name, evaluated in a subprocess, and only then renamed.
Under torchrun or deepspeed all processes measure. See docs/how-to/pruning.md.
"""

from __future__ import annotations

import argparse

from foundation.cli import add_config_arguments, guarded, leave
from foundation.configfile import load
from foundation.section import parse
from pipeline.compress.pruning.config import PruneConfig
from pipeline.compress.pruning.rules import prepare
from pipeline.runtime.launch import detect


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="prune.py", description=__doc__.splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_config_arguments(parser)
    # the deepspeed launcher passes it to every script; ranks read their local rank from the environment
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Checks and runs the config; torch is imported only after the checks."""
    launch = detect()
    plan = prepare(parse(PruneConfig, load(arguments.config, arguments.overrides)), world_size=launch.world_size)

    from pipeline.compress.pruning.run import prune  # noqa: PLC0415  (brings in torch)

    prune(plan, launch)
    return 0


if __name__ == "__main__":
    leave(guarded(main))
