"""What the fork servers import before they fork: what training, data prep or a consumer of models needs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

_TRAINING = (
    "pipeline.run.session",
    "pipeline.run.hooks.measured",
    "pipeline.run.hooks.metrics",
    "pipeline.run.hooks.step_time",
    "pipeline.compress.quantization.run",
    "pipeline.compress.pruning.run",
    "pipeline.evaluation.heldout.command",
    "pipeline.own_loop.torch_engine",
    "pipeline.own_loop.deepspeed_engine",
    "pipeline.plan.proof.command",
    "headrace.commands.app",
)
"""In addition to the modules that `pipeline.run.preload` imports."""
_DATA_PREP = (
    "data_prep.executors.choose",
    "data_prep.job.estimate",
    "data_prep.job.phases",
    "data_prep.job.prepare",
    "data_prep.job.stats",
    "data_prep.job.status",
    "data_prep.packing.pack",
    "data_prep.sources.parquet",
    "data_prep.tasks.map",
    "data_prep.tasks.reduce",
    "data_prep.tasks.tokenizer_sample",
    "data_prep.tokenizer.existing",
)
"""The modules that the commands of data prep import, without torch."""


def import_for_training() -> None:
    """What ranks, evaluation and compression import."""
    for name in _TRAINING:
        importlib.import_module(name)
    from pipeline.run.preload import preload  # noqa: PLC0415

    preload(["pipeline.plan.proof.rank"], ("torch", "deepspeed"), ("llama", "qwen3_moe"))


def import_for_vllm() -> None:
    """vLLM, by the worker that scores with it: its settings are read at the import. This project is not there."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "pipeline/evaluation/consumers"))
    importlib.import_module("vllm_worker")
    del sys.path[0]


def import_for_data_prep() -> None:
    """Imports, and starts the fork server of workers, which would take half of a job's CPU time.

    Forked processes share it. It is not their child, so they cannot check that it is alive.
    """
    for name in _DATA_PREP:
        importlib.import_module(name)
    from multiprocessing import forkserver  # noqa: PLC0415

    from data_prep.executors.local import start_fork_server  # noqa: PLC0415

    start_fork_server()
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
