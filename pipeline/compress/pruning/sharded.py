"""Gathers importance with a sharded model: tensor, pipeline and context parallelism, FSDP2, ZeRO-3.

The layout's engine runs the model as in an evaluation during training; each process reads its shards from the files.
Each process hooks the modules of its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foundation.errors import ConfigError
from pipeline.compress.pruning.importance import Sums, Windows
from pipeline.compress.pruning.layout import as_importance
from pipeline.compress.pruning.observing import Observer, left_out
from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.base import Engine
from pipeline.engines.build import build_engine
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.models.attention import attention_of
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.decoder_layers import decoder_layers
from pipeline.models.hf_config import read_hf_config


def open_model(run: ResolvedRun) -> nn.Module:
    """Opens a layout's model on the meta device, in fp32; an unsupported layout fails before a process group opens.

    Raises:
        ConfigError: the architecture does not support the layout.
    """
    assert run.config.model.path is not None
    config: Any = read_hf_config(run.config.model.path)
    for key, value in config.to_dict().items():  # training settings; evaluations have no dropout
        if ("dropout" in key or key.endswith(("pdrop", "layerdrop"))) and isinstance(value, float):
            setattr(config, key, 0.0)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    model = build_meta(config, dtype=torch.float32, attn_implementation=attention_of(run))
    try:
        check_layout(run, model)
    except ConfigError as error:
        raise as_importance(error) from None
    return model


@torch.no_grad()
def gather_sharded(
    run: ResolvedRun,
    model: nn.Module,
    batches: Sequence[Windows],
    *,
    device: torch.device,
    depth_loss: bool = False,
) -> Sums:
    """Gathers this process's part of the sums, for `importance.add_up`. Collective.

    Args:
        run: the layout.
        model: result of `open_model`.
        batches: batches of this process, equal in number on every process.
        device: device of this process.
        depth_loss: whether to run all batches once more without each layer.

    Returns:
        Key -> fp64 on the CPU.
    """
    assert run.config.model.path is not None
    values = FromSafetensors(run.config.model.path, model=model)
    engine = build_engine(run, model, values, CrossEntropy(), device=device)
    observer = Observer(device)
    with ExitStack() as stack:
        for decoder in engine.decoders:
            stack.enter_context(observer.watching(decoder.causal))
            stack.callback(_counting(decoder, observer, batches).remove)
        engine.evaluate(each.batch for each in batches)
    sums = {key: value.cpu() for key, value in observer.sums.items()}
    return sums | (_without_layers(engine, batches, model.config.num_hidden_layers) if depth_loss else {})  # type: ignore[union-attr, arg-type]


def _counting(decoder: nn.Module, observer: Observer, batches: Sequence[Windows]) -> Any:
    """Hooks a decoder to begin the next batch at every pass: schedules keep the order of batches."""
    coming = iter(batches)

    def begin(*_: Any) -> None:
        windows = next(coming)
        observer.begin(rows=windows.real, of=len(windows.batch.input_ids))

    return decoder.register_forward_pre_hook(begin)


def _without_layers(engine: Engine, batches: Sequence[Windows], count: int) -> Sums:
    """Loss without each layer, over all processes; ranks other than 0 return zeros, as sums are added up."""
    own = {number: layer for decoder in engine.decoders for number, layer in decoder_layers(decoder.causal).items()}
    sums: Sums = {}
    for number in range(count):
        with left_out(own.get(number)):
            nats = engine.evaluate(each.batch for each in batches).nats
        sums[f"layers.{number}.without"] = torch.tensor([nats if dist.get_rank() == 0 else 0.0], dtype=torch.float64)
    return sums
