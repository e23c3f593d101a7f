"""The verbs of the command line: first the eight that lead from a text to a served model, then all others.

`headrace`, `python -m headrace` and `python -m pipeline` use this table. Modules are named, not imported: only the
given verb's is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Declare = Callable[[Any], None]
Run = Callable[[argparse.Namespace], int | None]

WAY, DATA_PREP, TRAINING = "From text to a model that serves", "Data prep", "Training"
MODELS, COMPRESSION, CONFIG = "Models", "Compression", "Config"


@dataclass(frozen=True)
class Verb:
    """A verb of the command line.

    Attributes:
        name: the verb, as the user types it.
        text: one line of help.
        heading: heading under which the help lists the verb.
        module: module with `add_arguments(parser)`, for the options, and `run(arguments)`, which returns the exit code.
        functions: these two functions, if one module has several verbs; None for `module`'s.
        config: kind of config file that `--set` overrides (`foundation.config_kinds`).
    """

    name: str
    text: str
    heading: str
    module: str = ""
    functions: tuple[Declare, Run] | None = None
    config: str = "run"

    def load(self) -> tuple[Declare, Run]:
        """Imports the verb's module and returns its `add_arguments` and `run`."""
        if self.functions is not None:
            return self.functions
        module = import_module(self.module)
        return module.add_arguments, module.run


VERBS = (
    Verb(
        "prep",
        "turn text into tokens: clean, deduplicate, tokenize, shard",
        WAY,
        "data_prep.__main__",
        config="corpus",
    ),
    Verb(
        "check",
        "print the resolved run of a config, or the one thing that is wrong with it",
        WAY,
        "pipeline.plan.check",
    ),
    Verb(
        "plan",
        "memory, time and money of a run before it starts; the best layouts; --calibrate measures this machine",
        WAY,
        "pipeline.plan.command_plan",
    ),
    Verb(
        "train",
        "train a language model, or resume from the newest checkpoint of run.dir",
        WAY,
        "pipeline.train",
    ),
    Verb(
        "status",
        "show how far a run or a data-prep job is, live: loss, goodput, restarts, Slurm job; why it ended; its log",
        WAY,
        "headrace.commands.status",
    ),
    Verb(
        "export",
        "write a run's model as a Hugging Face folder",
        WAY,
        "pipeline.checkpoint.export.command_export",
    ),
    Verb(
        "compress",
        "prune, distil, quantize and evaluate from one config; verify a result",
        WAY,
        "pipeline.compress.recipe.command",
        config="compress",
    ),
    Verb(
        "submit",
        "submit configs to Slurm: data prep, training, export, compression, in a chain",
        WAY,
        "headrace.commands.submit",
    ),
    Verb(
        "import",
        "turn tokens of other tools into a tokens directory, or a checkpoint of another trainer into a run",
        DATA_PREP,
        "headrace.commands.import_",
    ),
    Verb(
        "prove",
        "show that a config's layout, on a small model, has the losses of one process",
        TRAINING,
        "pipeline.plan.proof.command",
    ),
    Verb(
        "branch",
        "write the config of a run that begins with a step of another run",
        TRAINING,
        "pipeline.run.command_branch",
    ),
    Verb(
        "doctor",
        "check a machine, or the nodes of a Slurm job, before the first training on it",
        TRAINING,
        "headrace.doctor.command",
    ),
    Verb(
        "islands",
        "train with low communication (DiLoCo): a lighthouse and islands on this machine, or the lighthouse alone",
        TRAINING,
        "pipeline.run.groups.islands.command",
    ),
    Verb(
        "replicas",
        "train replicas of the model that may die and come back: a lighthouse and replicas on this machine",
        TRAINING,
        "pipeline.run.groups.replicas.command",
    ),
    Verb(
        "goodput",
        "goodput under failures, simulated; the best checkpoint interval",
        TRAINING,
        "pipeline.runtime.goodput.command",
    ),
    Verb(
        "ladder",
        "predict the held-out loss of a large run from a ladder of small ones on the same data",
        TRAINING,
        "pipeline.plan.ladder.command",
    ),
    Verb(
        "samples",
        "print the text that a step of a run was trained on",
        TRAINING,
        "pipeline.run.anomalies.suspect_samples",
    ),
    Verb(
        "report",
        "a self-contained HTML page of runs and models",
        TRAINING,
        "pipeline.evaluation.report.command",
    ),
    Verb(
        "checkpoint",
        "list, verify or export the checkpoints of a run",
        TRAINING,
        "pipeline.checkpoint.export.command_checkpoint",
    ),
    Verb(
        "merge",
        "average checkpoints of a run or of its branches: mean, EMA, WSM, given weights",
        MODELS,
        "pipeline.checkpoint.merging.command",
    ),
    Verb(
        "card",
        "write the papers of a directory: card, Croissant, the EU's summary of training content, SBOM",
        MODELS,
        "pipeline.checkpoint.export.command_card",
        config="card",
    ),
    Verb(
        "eval",
        "held-out loss of a model, or of several; tasks with answers",
        MODELS,
        "pipeline.evaluation.comparison.command",
    ),
    Verb(
        "complete",
        "continue a prompt with a model",
        MODELS,
        "pipeline.evaluation.heldout.complete",
    ),
    Verb(
        "copy",
        "copy tokens or a model to an object store, or from one, whole or not at all",
        MODELS,
        "headrace.commands.copy",
    ),
    Verb(
        "push",
        "push a model or tokens, with its card, to the Hugging Face Hub, in one commit",
        MODELS,
        "headrace.commands.push",
    ),
    Verb(
        "prune",
        "cut channels, heads, experts and layers out of a finished model",
        COMPRESSION,
        "pipeline.prune",
        config="prune",
    ),
    Verb(
        "cache-logits",
        "keep a teacher's likeliest ids per position, to distil without it",
        COMPRESSION,
        "pipeline.cache_logits",
    ),
    Verb(
        "distill",
        "train a student to follow a frozen teacher",
        COMPRESSION,
        "pipeline.distill",
    ),
    Verb(
        "quantize",
        "write a finished model in 8 or 4 bits: a Hugging Face folder or a GGUF file",
        COMPRESSION,
        "pipeline.quantize",
        config="quantize",
    ),
    Verb(
        "schema",
        "print the JSON Schema of a config file, for editors",
        CONFIG,
        "headrace.commands.schema",
    ),
    Verb(
        "explain",
        "explain a config key: meaning, type, default, example",
        CONFIG,
        "headrace.commands.explain",
    ),
)
