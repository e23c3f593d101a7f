"""The config of a loop of one's own: the sections of a run that say how to train, without model, data and run.

The same DeepSpeed keys with the same meaning, and the same refusals.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat

from headrace.base import configfile
from headrace.base.cli import add_config_arguments
from headrace.base.errors import ConfigError
from headrace.base.section import Count, Section, parse
from pipeline.config.batch import split_batch
from pipeline.config.deepspeed_keys import refuse_by_name, without_auto
from pipeline.config.deepspeed_schema import (
    Bf16Section,
    Fp16Section,
    OptimizerSection,
    SchedulerSection,
    ZeroSection,
)
from pipeline.config.schema import LaunchSection

_IN_YOUR_CODE = "remove it: your own code does this"
_OURS = {
    "model": _IN_YOUR_CODE,
    "data": _IN_YOUR_CODE,
    "run": _IN_YOUR_CODE,
    "evaluation": _IN_YOUR_CODE,
    "distill": _IN_YOUR_CODE,
    "loss": _IN_YOUR_CODE,
    "wandb": _IN_YOUR_CODE,
    "memory": "use torch.utils.checkpoint in your model",
    "parallel": "a model that only you know is sharded over all ranks; for pp, tp and cp use pipeline/train.py",
    "pipeline": "a model that only you know is sharded over all ranks; for pp, tp and cp use pipeline/train.py",
    "tensor_parallel": "a model that only you know is sharded over all ranks; for pp, tp and cp use pipeline/train.py",
}


class LoopConfig(Section):
    """How a loop of one's own is executed."""

    engine: Literal["deepspeed", "torch"] = Field("deepspeed", description="deepspeed, or torch (DDP and FSDP2)")
    launch: LaunchSection = LaunchSection()
    train_batch_size: Count | None = Field(None, description="samples per update over all ranks")
    train_micro_batch_size_per_gpu: Count | None = Field(None, description="samples per forward pass of a rank")
    gradient_accumulation_steps: Count | None = Field(None, description="forward passes per update")
    optimizer: OptimizerSection | None = Field(None, description="AdamW; only where your code brings no optimizer")
    scheduler: SchedulerSection | None = None
    gradient_clipping: NonNegativeFloat = Field(0.0, description="largest norm of the whole gradient; 0 is off")
    zero_optimization: ZeroSection = ZeroSection()
    bf16: Bf16Section = Bf16Section()
    fp16: Fp16Section = Fp16Section()
    steps_per_print: Count | None = Field(None, description="how often DeepSpeed itself logs; never when absent")
    wall_clock_breakdown: bool = False


@dataclass(frozen=True)
class BatchShare:
    """How the samples of an update are shared out.

    Attributes:
        total: samples per update over all ranks.
        micro: samples per forward pass of a rank.
        accumulation: forward passes per rank and update.
        ranks: number of ranks.
        rank: this one.
    """

    total: int
    micro: int
    accumulation: int
    ranks: int
    rank: int

    def slices(self) -> list[slice]:
        """This rank's parts of an update's samples, one per forward pass.

        Forward pass j of all ranks together is one stretch of the samples, so that what is added up in which order
        depends on the micro-batch and not on the number of ranks alone.
        """
        starts = ((j * self.ranks + self.rank) * self.micro for j in range(self.accumulation))
        return [slice(start, start + self.micro) for start in starts]


def load_loop_config(source: str | Path | Mapping[str, Any] | None) -> LoopConfig:
    """Reads and checks the config.

    Args:
        source: a JSON file, or its content; None takes the file from the command line (`--config`, `--set`).

    Raises:
        ConfigError: it cannot be read, or holds what cannot run.
    """
    overrides: list[str] = []
    if source is None:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_config_arguments(parser)
        given, _ = parser.parse_known_args()
        source, overrides = given.config, given.overrides
    assert source is not None
    raw = without_auto(dict(source) if isinstance(source, Mapping) else configfile.load(source, overrides))
    for key, remedy in _OURS.items():
        if key in raw:
            raise ConfigError(key, raw[key], why="it has no meaning in a loop of one's own", remedy=remedy)
    refuse_by_name(raw)
    config = parse(LoopConfig, raw)
    _check(config)
    return config


def share(config: LoopConfig, *, loader_batch: int | None, ranks: int, rank: int) -> BatchShare:
    """Derives the batch arithmetic.

    Args:
        config: the batch keys. Without any, one update takes one batch of the loader, as in the plain loop.
        loader_batch: samples in a batch of the user's loader, where that is known.
        ranks: number of ranks.
        rank: this one.

    Raises:
        ConfigError: the numbers do not divide, or the loader's batch is neither an update nor a micro-batch.
    """
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if total is None and micro is None:
        total = loader_batch
    whole, micro, accumulation = split_batch(total, micro, config.gradient_accumulation_steps, dp=ranks)
    if loader_batch not in (None, whole, micro):
        why = f"the loader's batches have {loader_batch} samples: neither those of an update nor of a forward pass"
        remedy = f"give the loader batches of {whole} or {micro}, or change the key"
        raise ConfigError("train_batch_size", whole, why=why, remedy=remedy)
    return BatchShare(whole, micro, accumulation, ranks, rank)


def _check(config: LoopConfig) -> None:
    if config.bf16.enabled and config.fp16.enabled:
        raise ConfigError("fp16.enabled", True, why="bf16 is enabled too", remedy="enable one of the two")
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(config.zero_optimization, name).device
        allowed = {"none", "cpu"} if config.engine == "deepspeed" else {"none"}
        if device not in allowed:
            why = f"it is not offered in a loop of one's own on engine {config.engine}"
            remedy = "remove it, or use pipeline/train.py with engine deepspeed"
            raise ConfigError(f"zero_optimization.{name}.device", device, why=why, remedy=remedy)
