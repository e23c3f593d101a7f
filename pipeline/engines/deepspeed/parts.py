"""This rank's part of the model, real: assembled, given its values, and marked the way DeepSpeed looks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.rules import ResolvedRun
from pipeline.engines.common import decay_groups, make_adamw
from pipeline.engines.deepspeed.gated import with_update_gate
from pipeline.engines.deepspeed.replicated import Counted, Replicated
from pipeline.models.materialise import materialise
from pipeline.models.values import ParameterValues
from pipeline.parallel.assemble import Assembled, ShardedValues, assemble
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.stages import StageLayers


def make_part(
    run: ResolvedRun,
    model: nn.Module,
    values: ParameterValues,
    mesh: Mesh | None,
    *,
    device: torch.device,
    stage: StageLayers | None = None,
    place: Callable[[nn.Parameter], None] | None = None,
) -> Assembled:
    """Builds and fills what this rank computes. No rank holds more than its part and one parameter.

    Args:
        run: the resolved config.
        model: whole, on meta.
        values: first values of its parameters.
        mesh: this rank's place; None for one process.
        device: where the part goes.
        stage: the piece to make; the whole model when None.
        place: called with each parameter as soon as it is real.
    """
    assembled = assemble(run, model, mesh, stage=stage)
    # a head that is tied, alone on its stage, is called otherwise than the embedding it is a copy of
    names = {id(parameter): name for name, parameter in assembled.decoder.named().items()}
    materialise(assembled.decoder.causal, ShardedValues(values, assembled), device=device, place=place, names=names)
    if assembled.tensor is not None:
        named = assembled.decoder.named()
        for name in assembled.tensor.boxes:
            named[name].tensor_model_parallel = True  # type: ignore[attr-defined]  # what DeepSpeed's norm looks for
    return assembled


def make_optimizer(
    run: ResolvedRun,
    assembled: Assembled,
    decayed: set[str],
    *,
    holders: dist.ProcessGroup | None,
    counts_whole: bool,
    permits: Callable[[], bool],
) -> torch.optim.Optimizer:
    """AdamW as DeepSpeed's engine gets it: `Replicated` at stage 0, else torch's, which ZeRO wraps.

    Args:
        run: the resolved config.
        assembled: this rank's part, real.
        decayed: names that weight decay applies to.
        holders: the ranks that together hold the whole model; None when this one does.
        counts_whole: this rank counts the gradients of parameters that all tp ranks hold whole.
        permits: asked before every update, when the norm is known, whether to make it.
    """
    params, named = run.config.optimizer.params, assembled.decoder.named()
    if run.config.zero_optimization.stage > 0:
        sum_partial_gradients(assembled)
        groups = decay_groups(named, decayed, weight_decay=params.weight_decay)
        return with_update_gate(make_adamw(groups, params), permits)
    cut = assembled.tensor.boxes.keys() if assembled.tensor else set()
    second = assembled.shared if not assembled.decoder.form.first else frozenset()
    names = frozenset(name for name in named if (counts_whole or name in cut) and name not in second)
    clip, counted = run.config.gradient_clipping, Counted(names, holders)
    return Replicated(assembled, decayed, params, clip=clip, counted=counted, permits=permits)


def sum_partial_gradients(assembled: Assembled) -> None:
    """Has the gradients that are partial on every tp rank summed before DeepSpeed takes them.

    A hook on a leaf sees its whole gradient of a backward pass, before those hooks run by which DeepSpeed moves it
    into buckets. The sum is taken in fp32.
    """
    if assembled.tensor is None:
        return
    named = assembled.decoder.named()
    for name in sorted(assembled.tensor.summed & named.keys()):
        named[name].register_hook(partial(_summed, assembled.tensor.group))


def _summed(group: dist.ProcessGroup, gradient: Tensor) -> Tensor:
    total = gradient.float() if gradient.dtype != torch.float32 else gradient.clone()
    dist.all_reduce(total, group=group)
    return total.to(gradient.dtype)


def shard_at_once(config: dict[str, Any], unit: Any) -> Callable[[nn.Parameter], None]:
    """ZeRO-3: a parameter is cut up over the data group as soon as it has its value.

    Args:
        config: DeepSpeed's.
        unit: the groups as DeepSpeed asks for them; None when all ranks are the data group.
    """
    group = None if unit is None else unit.get_data_parallel_group()

    def place(parameter: nn.Parameter) -> None:
        module = nn.ParameterList([parameter])
        deepspeed.zero.Init(module=module, config_dict_or_path=config, data_parallel_group=group, mpu=unit)

    return place
