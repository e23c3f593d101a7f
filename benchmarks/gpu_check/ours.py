"""Our own training step: the config, `build_engine` and `StepBatch`, as `pipeline/train.py` uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.cases import Row, Size
from benchmarks.gpu_check.inputs import draw, tokens
from benchmarks.gpu_check.meter import Meter
from foundation.section import parse
from pipeline.config.rules.resolve import ResolvedRun, resolve
from pipeline.config.sections.run import Config
from pipeline.data.micro_batch import MicroBatch, StepBatch
from pipeline.engines.base import PendingStep
from pipeline.engines.build import build_engine
from pipeline.engines.common import model_dtype
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.counter import CPU
from pipeline.models.construction.initial_values import OwnBuffers
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.rectangle import Rectangle, part
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.sdpa_order import ordered_sdpa
from pipeline.runtime.launch import detect, process_group

LR = 1e-4


class NotAvailableError(Exception):
    """This version of the project lacks a feature that a row measures."""


class DrawnOnDevice(OwnBuffers):
    """First values by `inputs.draw`: they initialize a model of 8B in a second, not in minutes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes, self._device = shapes, device

    def value(self, name: str, *, box: Rectangle | None = None, device: torch.device = CPU) -> Tensor:
        """Draws the full value and returns the part within the box (see `ParameterValues.value`)."""
        return part(draw(name, self._shapes[name], self._device), box).to(device)


def config_of(size: Size, row: Row, *, micro: int, checkpointing: str) -> dict[str, Any]:
    """The config of a row, as a user would write it."""
    config: dict[str, Any] = {
        "engine": row.contestant,
        "model": {"config": size.model},
        "data": {"sources": [{"path": "synthetic"}], "sequence_length": size.sequence},
        "train_batch_size": size.samples,
        "train_micro_batch_size_per_gpu": micro,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "memory": {"activation_checkpointing": checkpointing},
        "compile": {"enabled": row.mode != "eager"},
        "run": {"dir": "unused", "steps": 1000},
    }
    if row.on_all_gpus:
        del config["compile"]  # a GPU compiles by default
        config["zero_optimization"] = {"stage": 3}
    if row.contestant == "deepspeed":
        config["zero_optimization"] = {"stage": 1}
    if row.mode == "fp8":
        if "fp8" not in Config.model_fields:
            raise NotAvailableError("this version's config has no fp8 section")
        config["fp8"] = {"recipe": "tensorwise"}
    return config


@contextmanager
def opened(device: torch.device) -> Iterator[None]:
    """Opens the process group, which DeepSpeed needs even for one process."""
    with process_group(detect(), gpu=device.index), ordered_sdpa(device):
        yield


class Contestant:
    """An engine that is ready to train.

    Args:
        size: the model.
        row: engine and mode.
        micro: micro-batch size in samples.
        checkpointing: activation checkpointing: none or full.
        device: device of the engine.
    """

    def __init__(self, size: Size, row: Row, *, micro: int, checkpointing: str, device: torch.device) -> None:
        run = resolve(
            parse(Config, config_of(size, row, micro=micro, checkpointing=checkpointing)),
            world_size=detect().world_size,
        )
        self._size, self._run, self._device = size, run, device
        vocabulary = {"vocab_size": size.model["vocab_size"]}
        hf = resolve_hf_config(run.config.model, tokenizer=vocabulary, sequence_length=size.sequence)
        attention = "sdpa" if run.plain else ATTENTION_NAME
        model = build_meta(hf, dtype=model_dtype(run.config), attn_implementation=attention)
        check_layout(run, model)
        values = DrawnOnDevice({name: tuple(p.shape) for name, p in model.named_parameters()}, device)
        self._engine = build_engine(run, model, values, CrossEntropy(), device=device)

    def train(self, meter: Meter) -> float:
        """Runs the meter's steps; returns the mean loss in nats per token."""
        losses, batches = [], [step_batch(self._size, self._run, step, self._device) for step in range(meter.total)]
        before: PendingStep | None = None
        for batch in batches:  # as in the training loop: a step begins before the step before is read
            begun = self._engine.begin_step(batch, lr=LR, after=before)
            if before is not None:
                losses.append(before.result().loss)
            before = begun if self._engine.deferred else None
            if before is None:
                losses.append(begun.result().loss)
            meter.end_step()
        if before is not None:
            losses.append(before.result().loss)
        return sum(losses) / len(losses)


def step_batch(size: Size, run: ResolvedRun, step: int, device: torch.device) -> StepBatch:
    """This rank's micro-batches of a step, in page-locked memory where there is a GPU, as the loader gives them."""
    rows = tokens(size, step).chunk(run.topology.world_size)[detect().rank]
    whole = MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    micros = whole.split(run.batch.micro)
    pinned = [micro.pin_memory() for micro in micros] if device.type == "cuda" else micros
    return StepBatch(step + 1, pinned, size.tokens_per_step)
