"""`headrace replicas`: runs the lighthouse and replicas of a run on this machine; replicas may die and restart."""

from __future__ import annotations

import argparse

from pipeline.config.rules.groups import REPLICAS, check_replicas_section
from pipeline.run.groups.islands import command
from pipeline.run.groups.islands.command import GroupKind

_REPLICAS = GroupKind(REPLICAS, "replica", check_replicas_section)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    command.add_arguments(parser, _REPLICAS)


def run(arguments: argparse.Namespace) -> int:
    """Runs the lighthouse and the replicas; returns the exit code of the first replica that failed, or 0."""
    return command.run(arguments, _REPLICAS)
