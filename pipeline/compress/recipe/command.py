"""`headrace compress run|verify|consumers`: runs a whole compression from one config, and scores its results."""

from __future__ import annotations

import argparse

from foundation.cli import add_config_arguments
from foundation.configfile import load
from foundation.section import parse
from pipeline.compress.recipe.config import RecipeConfig
from pipeline.evaluation.consumers import command_compress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headrace compress`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="run|verify|consumers")
    text = "prune, distil, quantize and evaluate a model, as one config says; goes on where it was interrupted"
    add_config_arguments(verbs.add_parser("run", help=text, description=f"{text.capitalize()}."))
    command_compress.add_verbs(verbs)


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen verb.

    Raises:
        ConfigError, DataError: the verb refuses its arguments or its data.
    """
    if arguments.verb != "run":
        return command_compress.run(arguments)
    from pipeline.compress.recipe.run import run_recipe  # noqa: PLC0415  (brings in torch)

    return run_recipe(parse(RecipeConfig, load(arguments.config, arguments.overrides)))
