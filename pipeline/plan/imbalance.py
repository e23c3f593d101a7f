"""`--imbalance` of `headrace check` and `headrace plan`. No torch."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from foundation.errors import ConfigError
from pipeline.config.rules.resolve import ResolvedRun


def add_imbalance_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the option `--imbalance`."""
    parser.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="expert parallelism: rows of the fullest rank over the mean, which its memory and time follow, e.g. 1.3"
        " (default: assumed from moe.balance, and printed)",
    )


def with_imbalance(run: ResolvedRun, imbalance: float | None) -> ResolvedRun:
    """Returns the run with a given imbalance, or unchanged if the imbalance is None.

    Raises:
        ConfigError: the imbalance is below 1 or not finite, or the run has no expert parallelism.
    """
    if imbalance is None:
        return run
    if not 1 <= imbalance < math.inf:
        why = "it is the fullest rank's share over the mean of all ranks, which is 1 or more"
        raise ConfigError("--imbalance", imbalance, why=why, remedy="e.g. --imbalance 1.3")
    if run.topology.ep == 1:
        why = "without expert parallelism every rank computes its own rows"
        raise ConfigError("--imbalance", imbalance, why=why, remedy="leave it out, or set parallel.ep")
    return replace(run, imbalance=imbalance)
