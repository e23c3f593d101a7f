"""Config of a custom training loop: a run's training sections, without model, data and run.

The DeepSpeed keys have the same meaning as in a run, and the same checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat

from foundation import configfile
from foundation.cli import add_config_arguments
from foundation.errors import ConfigError, refuse_all
from foundation.section import Count, Section, parse, problems_of
from pipeline.config.batch import split_batch
from pipeline.config.deepspeed.file import translate
from pipeline.config.rules.training import check_optimizer
from pipeline.config.sections.deepspeed import Bf16Section, Fp16Section, SchedulerSection, ZeroSection
from pipeline.config.sections.optimizers import LISTED, OptimizerSection, UpdateScope
from pipeline.config.sections.run import LaunchSection
from pipeline.runtime.launch import detect

_IN_YOUR_CODE = "remove it: this is up to your own code"
_NOT_IN_A_LOOP = {
    "model": _IN_YOUR_CODE,
    "data": _IN_YOUR_CODE,
    "run": _IN_YOUR_CODE,
    "evaluation": _IN_YOUR_CODE,
    "distill": _IN_YOUR_CODE,
    "loss": _IN_YOUR_CODE,
    "wandb": _IN_YOUR_CODE,
    "tensorboard": _IN_YOUR_CODE,
    "mlflow": _IN_YOUR_CODE,
    "prometheus": _IN_YOUR_CODE,
    "callbacks": _IN_YOUR_CODE,
    "sinks": _IN_YOUR_CODE,
    "memory": "use torch.utils.checkpoint in your model",
    "parallel": "remove it: a custom model is sharded over all ranks; for pp, tp and cp use pipeline/train.py",
    "pipeline": "remove it: a custom model is sharded over all ranks; for pp, tp and cp use pipeline/train.py",
    "expert_parallel": "remove it: a custom model is sharded over all ranks; for ep use pipeline/train.py",
    "tensor_parallel": "remove it: a custom model is sharded over all ranks; for pp, tp and cp use pipeline/train.py",
}


class LoopConfig(Section):
    """Config of a custom training loop."""

    engine: Literal["deepspeed", "torch"] = Field(
        "deepspeed", description="Training engine: deepspeed (ZeRO), or torch (native DDP and FSDP2)"
    )
    launch: LaunchSection = LaunchSection()
    train_batch_size: Count | None = Field(
        None, description="Global batch size: samples per optimizer step over all ranks, e.g. 512"
    )
    train_micro_batch_size_per_gpu: Count | None = Field(
        None, description="Micro-batch size: samples per forward/backward pass on one rank, e.g. 4"
    )
    gradient_accumulation_steps: Count | None = Field(
        None,
        description="Gradient accumulation: micro-batches whose gradients are accumulated per optimizer step, e.g. 8",
    )
    optimizer: OptimizerSection | None = Field(
        None, description=f"{LISTED}; only if your code passes no optimizer to prepare()"
    )
    scheduler: SchedulerSection | None = Field(
        None, description="Learning-rate scheduler; only if your code passes no torch scheduler to prepare()"
    )
    gradient_clipping: NonNegativeFloat = Field(
        1.0,
        description="Gradient clipping: largest L2 norm of the gradient of all parameters, e.g. 1.0, the default, as"
        " in DeepSpeed; 0 is off",
    )
    zero_optimization: ZeroSection = ZeroSection()
    bf16: Bf16Section = Bf16Section()
    fp16: Fp16Section = Fp16Section()
    steps_per_print: Count | None = Field(
        None, description="Steps between DeepSpeed's own log lines, e.g. 100; none when absent"
    )
    wall_clock_breakdown: bool = Field(
        False, description="true: DeepSpeed times forward, backward and optimizer step and logs it"
    )


@dataclass(frozen=True)
class BatchShare:
    """Division of an optimizer step's samples over ranks and micro-batches.

    Attributes:
        total: global batch size, in samples per optimizer step.
        micro: micro-batch size of a rank.
        accumulation: gradient accumulation steps.
        ranks: number of ranks.
        rank: this rank.
    """

    total: int
    micro: int
    accumulation: int
    ranks: int
    rank: int

    def slices(self) -> list[slice]:
        """This rank's slices of a global batch, one per micro-batch.

        The j-th micro-batches of all ranks together are contiguous samples: the order of summation depends on the
        micro-batch size, not on the number of ranks alone.
        """
        starts = ((j * self.ranks + self.rank) * self.micro for j in range(self.accumulation))
        return [slice(start, start + self.micro) for start in starts]


def load_loop_config(source: str | Path | Mapping[str, Any] | None) -> LoopConfig:
    """Reads and checks the config.

    Args:
        source: a JSON file, or its content; None reads `--config` and `--set` from the command line.

    Raises:
        ConfigError: the config cannot be read, or is invalid.
    """
    overrides: list[str] = []
    if source is None:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_config_arguments(parser)
        given, _ = parser.parse_known_args()
        source, overrides = given.config, given.overrides
    assert source is not None
    given_keys = dict(source) if isinstance(source, Mapping) else configfile.load(source, overrides)
    translated = translate(given_keys, micro_batch=None)  # "auto" means the loader's batch here
    raw = translated.raw
    why = "it has no meaning in a custom training loop"
    foreign = [ConfigError(key, raw[key], why=why, remedy=text) for key, text in _NOT_IN_A_LOOP.items() if key in raw]
    if foreign or translated.refused:
        others = {key: value for key, value in raw.items() if key not in _NOT_IN_A_LOOP}
        refuse_all([*foreign, *translated.refused, *problems_of(LoopConfig, others)])
    config = parse(LoopConfig, raw)
    _check(config)
    for label, texts in (("auto", translated.auto), ("ignored", translated.ignored)):
        if texts and detect().rank == 0:
            print(f"{label}: {', '.join(texts)}", flush=True)
    return config


def share(config: LoopConfig, *, loader_batch: int | None, ranks: int, rank: int) -> BatchShare:
    """Derives the batch sizes.

    Args:
        config: the batch keys. Without any, an optimizer step takes one batch of the loader, as in the plain loop.
        loader_batch: batch size of the user's loader, if known.
        ranks: number of ranks.
        rank: this rank.

    Raises:
        ConfigError: the sizes do not divide, or the loader's batch size is neither the global batch nor a micro-batch.
    """
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if total is None and micro is None:
        total = loader_batch
    whole, micro, accumulation = split_batch(total, micro, config.gradient_accumulation_steps, dp=ranks)
    if loader_batch not in (None, whole, micro):
        why = f"the loader's batches have {loader_batch} samples: neither a global batch nor a micro-batch"
        remedy = f"use batches of {whole} or {micro} in the loader, or change the key"
        raise ConfigError("train_batch_size", whole, why=why, remedy=remedy)
    return BatchShare(whole, micro, accumulation, ranks, rank)


def _check(config: LoopConfig) -> None:
    if config.optimizer is not None:
        check_optimizer(config.optimizer)
        if config.optimizer.kind.scope is UpdateScope.MATRIX:
            why = "hidden matrices are known only in Hugging Face models that headrace train builds"
            remedy = "use AdamW, Lion or SGD, or pass torch.optim.Muon to prepare() on one device"
            raise ConfigError("optimizer.type", config.optimizer.type, why=why, remedy=remedy)
    if config.launch.fallback_layouts:
        why = "a custom model is sharded over all ranks, whatever their number"
        raise ConfigError("launch.fallback_layouts", why=why, remedy="remove it")
    if config.bf16.enabled and config.fp16.enabled:
        raise ConfigError("fp16.enabled", True, why="bf16.enabled is true, too", remedy="enable one of the two")
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(config.zero_optimization, name).device
        allowed = {"none", "cpu"} if config.engine == "deepspeed" else {"none"}
        if device not in allowed:
            why = f"it is not supported in a custom training loop on engine {config.engine}"
            remedy = "remove it, or use pipeline/train.py with engine deepspeed"
            raise ConfigError(f"zero_optimization.{name}.device", device, why=why, remedy=remedy)
