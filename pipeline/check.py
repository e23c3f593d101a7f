"""`python -m pipeline check --config F`: prints the resolved run, or the first error of the config.

The rules of the config come first and need no torch; checks of data and model follow.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.cli import add_config_arguments
from pipeline.arguments import has_begun
from pipeline.checkpoint.naming import finished_checkpoints
from pipeline.config.load import load_config
from pipeline.config.rules import ResolvedRun, resolve
from pipeline.launch import detect

if TYPE_CHECKING:
    from pipeline.run.prepare import PreparedRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m pipeline check`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--processes", type=_at_least_one, metavar="N", help="number of processes (default: as started, or 1)"
    )
    parser.add_argument(
        "--rules-only", action="store_true", help="check the config alone, without data and model: takes under a second"
    )
    text = "print only the step of the run's newest checkpoint (0 without any) and its directory, for job scripts"
    parser.add_argument("--progress", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Prints the resolved run."""
    config = load_config(arguments.config, arguments.overrides)
    if arguments.progress:
        newest = next(iter(finished_checkpoints(Path(config.run.dir))), None)
        print(newest[0] if newest else 0, config.run.dir)
        return 0
    resolved = resolve(config, world_size=arguments.processes or detect().world_size, begun=has_begun(config))
    if arguments.rules_only:
        _print_rules(resolved)
        return 0
    from pipeline.run.prepare import prepare  # noqa: PLC0415  imports torch, which takes seconds

    prepared = prepare(resolved)
    _print_rules(resolved)
    _print_prepared(prepared)
    return 0


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _print_rules(run: ResolvedRun) -> None:
    config, batch = run.config, run.batch
    _line("layout", run.layout)
    _line("processes", str(run.topology.world_size) + (f", and {run.spare} spare" if run.spare else ""))
    _line("precision", run.precision)
    if config.memory.activation_checkpointing != "none":
        which = "every layer" if config.memory.every_n_layers == 1 else f"one layer in {config.memory.every_n_layers}"
        _line("checkpointing", f"activations: {config.memory.activation_checkpointing}, {which}")
    _line("batch", str(batch))
    _line("steps", f"{run.steps:,} = {run.steps * batch.samples:,} samples = {run.steps * batch.tokens:,} tokens")
    rates = ", ".join(f"{run.schedule.lr(step):.2e} at step {step:,}" for step in _shown_steps(run))
    _line("learning rate", f"{run.schedule.kind}: {rates}")
    _line("run directory", config.run.dir)


def _print_prepared(prepared: PreparedRun) -> None:
    from pipeline.parallel.assemble import stage_lines  # noqa: PLC0415  imports torch

    run, size = prepared.run, prepared.size
    epochs = prepared.mixture.order.epochs(run.steps * run.batch.samples)
    _line("model", f"{prepared.hf_config['model_type']}, {size.parameters:,} parameters ({size.embedding:,} embedding)")
    if size.flops_per_token is not None:
        _line("compute", f"{size.flops_per_token / 1e6:,.1f} MFLOP per token, forward and backward")
    for line in stage_lines(run, prepared.model):
        _line(*line.split(": ", 1))
    for source, seen in zip(prepared.mixture.sources, epochs, strict=True):
        _line("data", f"{source.summary}, {seen:.2f} epochs")
    for source in prepared.heldout:
        _line("held-out", source.summary)
    newest = prepared.store.checkpoints()[:1]
    _line("start", f"resume after step {newest[0].step}" if newest else "a new run")


def _shown_steps(run: ResolvedRun) -> list[int]:
    return sorted({1, max(1, min(run.schedule.warmup, run.steps)), max(1, run.steps // 2), run.steps})


def _line(label: str, text: str) -> None:
    print(f"{label:>14}  {text}")
