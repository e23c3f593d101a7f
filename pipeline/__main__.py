"""`python -m pipeline COMMAND`: what `headrace COMMAND` does, without its extras. `--help` lists the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module

from headrace.base.cli import guarded, leave

COMMANDS = {
    "train": ("pipeline.train", "train a language model, or resume from the newest checkpoint of run.dir"),
    "cache-logits": ("pipeline.cache_logits", "keep a teacher's likeliest ids per position, to distil without it"),
    "distill": ("pipeline.distill", "train a student to follow a frozen teacher"),
    "prune": ("pipeline.prune", "cut channels, heads, experts and layers out of a finished model"),
    "quantize": ("pipeline.quantize", "write a finished model in 8 or 4 bits: a Hugging Face folder or a GGUF file"),
    "compress": (
        "pipeline.compress.recipe.command",
        "prune, distil, quantize and evaluate from one config; verify a result",
    ),
    "check": ("pipeline.plan.check", "print the resolved run of a config, or the one thing that is wrong with it"),
    "plan": (
        "pipeline.plan.command_plan",
        "memory, time and money of a run before it starts; the best layouts; --calibrate measures this machine",
    ),
    "prove": ("pipeline.plan.proof.command", "show that a config's layout, made small, learns what one process does"),
    "checkpoint": ("pipeline.checkpoint.export.command_checkpoint", "list, verify or export the checkpoints of a run"),
    "export": ("pipeline.checkpoint.export.command_export", "write a run's model as a Hugging Face folder"),
    "eval": (
        "pipeline.evaluation.comparison.command",
        "held-out loss of a model, or of several; tasks of lm_eval",
    ),
    "ladder": (
        "pipeline.plan.ladder.command",
        "predict the held-out loss of a large run from a ladder of small ones on the same data",
    ),
    "status": (
        "pipeline.cluster.status.command",
        "show how far a run is, live; why its job waits; why it ended; its log",
    ),
    "goodput": (
        "pipeline.runtime.goodput.command",
        "goodput under failures, simulated; the best checkpoint interval",
    ),
    "islands": (
        "pipeline.run.groups.islands.command",
        "train with low communication (DiLoCo): a lighthouse and islands on this machine, or the lighthouse alone",
    ),
    "replicas": (
        "pipeline.run.groups.replicas.command",
        "train replicas of the model that may die and come back: a lighthouse and replicas on this machine",
    ),
    "samples": ("pipeline.run.anomalies.suspect_samples", "print the text that a step of a run was trained on"),
    "complete": ("pipeline.evaluation.heldout.complete", "let a model go on from a prompt"),
    "report": ("pipeline.evaluation.report.command", "a self-contained HTML page of runs and models"),
}
"""Command -> (module with `add_arguments` and `run`, help text)."""


def main() -> int:
    """Parses the command line and runs the command; only the chosen command's module is imported."""
    parser = argparse.ArgumentParser(prog="python -m pipeline", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in sys.argv[1:] if word in COMMANDS), None)
    run: Callable[[argparse.Namespace], int] | None = None
    for name, (module_name, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            module = import_module(module_name)
            module.add_arguments(sub)
            run = module.run
    arguments = parser.parse_args()
    assert run is not None
    return run(arguments)


if __name__ == "__main__":
    leave(guarded(main))
