"""`python -m pipeline check --config F`: prints the resolved run and warnings, or what is wrong with the config.

The rules of the config come first and need no torch; checks of data and model follow.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headrace.base.cli import add_config_arguments
from pipeline.arguments import has_begun
from pipeline.checkpoint.naming import finished_checkpoints
from pipeline.config.load import read_config
from pipeline.config.rules import resolve
from pipeline.launch import detect
from pipeline.run.summary import Entry, as_json, prepared_entries, resolved_entries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m pipeline check`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--processes", type=_at_least_one, metavar="N", help="number of processes (default: as started, or 1)"
    )
    parser.add_argument(
        "--rules-only", action="store_true", help="check the config alone, without data and model: takes under a second"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of a device, e.g. 80GB: whether a rank fits, and the micro-batch that does",
    )
    text = "print only the step of the run's newest checkpoint (0 without any) and its directory, for job scripts"
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, with the resolved config")
    parser.add_argument("--progress", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Prints the resolved run."""
    loaded = read_config(arguments.config, arguments.overrides)
    config = loaded.config
    if arguments.progress:
        newest = next(iter(finished_checkpoints(Path(config.run.dir))), None)
        print(newest[0] if newest else 0, config.run.dir)
        return 0
    resolved = resolve(config, world_size=arguments.processes or detect().world_size, begun=has_begun(config))
    entries = [Entry(label, ", ".join(texts), list(texts)) for label, texts in loaded.notes]
    entries += resolved_entries(resolved)
    if not arguments.rules_only:
        from pipeline.run.advice import advice  # noqa: PLC0415  imports torch, which takes seconds
        from pipeline.run.memory_summary import memory_bytes, memory_entries  # noqa: PLC0415
        from pipeline.run.prepare import prepare  # noqa: PLC0415

        device_memory = None if arguments.memory is None else memory_bytes(arguments.memory)
        prepared = prepare(resolved)
        entries += prepared_entries(prepared)
        entries += memory_entries(resolved, prepared.model, memory=device_memory)
        entries += [Entry("warnings", text, text) for text in advice(prepared)]
    if arguments.json:
        print(json.dumps({**as_json(entries), "config": config.model_dump(mode="json")}, indent=2))
        return 0
    for entry in entries:
        label = "warning" if entry.label == "warnings" else entry.label
        print(f"{label:>14}  {entry.text}")
    return 0


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number
