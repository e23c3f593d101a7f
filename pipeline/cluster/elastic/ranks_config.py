"""The config of the ranks that an agent starts. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress

from headrace.base.cli import add_config_arguments
from headrace.base.errors import HeadraceError
from pipeline.config.load import load_config
from pipeline.config.sections.run import Config


def ranks_config(arguments: Sequence[str]) -> Config | None:
    """The config that the arguments of the ranks name; None where it is refused, which the ranks report.

    Args:
        arguments: --config and --set.
    """
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_config_arguments(parser)
    with suppress(HeadraceError, OSError, argparse.ArgumentError, SystemExit):
        given, _ = parser.parse_known_args(list(arguments))
        return load_config(given.config, given.overrides)
    return None
