"""`headrace import SOURCE OUT`: imports tokens of other tools, or with --config a checkpoint of another trainer."""

from __future__ import annotations

import argparse

from data_prep.importing import command as tokens
from foundation.command_line import publish_outputs
from foundation.errors import ConfigError
from foundation.foreign_folders import recognise
from foundation.paths import LOCAL, is_store_url
from foundation.remote_output import local_output

_TEXT = """\
Turns what other tools wrote into directories of headrace.

  headrace import TOKENS OUT --tokenizer FOLDER          tokens, with their document borders, into a tokens directory
  headrace import CHECKPOINT RUN_DIR --config FILE       a checkpoint with its optimizer state and step into a run that
                                                         headrace train resumes"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.description = _TEXT
    tokens.add_arguments(parser)
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--config", metavar="FILE", type=LOCAL, help="config of the run that goes on from a checkpoint")
    text = "override one field of it, e.g. --set run.steps=100 (repeatable)"
    group.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "number of processes that will train, where the config's batch depends on it (default: 1)"
    group.add_argument("--processes", type=int, metavar="N", help=text)
    text = "optimizer steps of the checkpoint, if it records none or two numbers"
    group.add_argument("--step", type=int, metavar="N", help=text)


def run(arguments: argparse.Namespace) -> int | None:
    """Imports tokens or a checkpoint.

    Raises:
        ConfigError: neither --tokenizer nor --config is given, or both are.
    """
    if arguments.config is not None:
        if arguments.tokenizer is not None:
            why = "it is for tokens, and --config is for a checkpoint"
            raise ConfigError("--tokenizer", str(arguments.tokenizer), why=why, remedy="leave one of them out")
        from pipeline.run import import_checkpoint  # noqa: PLC0415  imports torch, which takes seconds

        return import_checkpoint.run(arguments)
    if arguments.tokenizer is None:
        found = recognise(arguments.tokens)
        checkpoint = found is not None and found.checkpoint
        what = f"{arguments.tokens} is {found.name}" if checkpoint and found else "the tokenizer that made the tokens"
        remedy = (
            f"{'--config FILE, the config of the run that goes on from it' if checkpoint else '--tokenizer FOLDER'}"
        )
        raise ConfigError("--config" if checkpoint else "--tokenizer", why=f"not given: {what}", remedy=remedy)
    urls = [arguments.out.rstrip("/")] if is_store_url(arguments.out) else []
    arguments.out = str(local_output(arguments.out.rstrip("/")))
    return publish_outputs(urls, lambda: tokens.run(arguments))
