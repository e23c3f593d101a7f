"""The command line of the entry points that a launcher may start. No torch: a refusal comes at once."""

from __future__ import annotations

import argparse

from headrace.cli import add_config_arguments
from pipeline.config.load import load_config
from pipeline.config.rules import ResolvedRun, resolve
from pipeline.launch import detect


def resolved_run(description: str) -> ResolvedRun:
    """Parses the command line, and resolves its config for the number of processes that were started.

    Raises:
        ConfigError: the config cannot run.
    """
    parser = argparse.ArgumentParser(description=description)
    add_config_arguments(parser)
    # the deepspeed launcher appends it; the place of a process is read from the environment instead
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    return resolve(config, world_size=detect().world_size)
