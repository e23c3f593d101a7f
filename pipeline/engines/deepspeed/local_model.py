"""Builds this rank's part of the model for DeepSpeed: assembled, materialized, and marked the way DeepSpeed expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn

from pipeline.config.rules import ResolvedRun
from pipeline.models.materialize import materialize
from pipeline.models.values import ParameterValues
from pipeline.parallel.assemble import LocalModel, ShardedValues, assemble
from pipeline.parallel.expert_balance import ExpertBalancer
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.stages import StageLayers


def build_local_model(
    run: ResolvedRun,
    model: nn.Module,
    values: ParameterValues,
    mesh: Mesh | None,
    *,
    device: torch.device,
    stage: StageLayers | None = None,
    balancer: ExpertBalancer | None = None,
    on_parameter: Callable[[nn.Parameter], None] | None = None,
) -> LocalModel:
    """Builds and materializes this rank's part of the model. No rank holds more than its part and one parameter.

    Args:
        run: the resolved config.
        model: the full model, on meta.
        values: initial values of its parameters.
        mesh: this rank's coordinates and groups; None for one process.
        device: of this rank.
        stage: the pipeline stage to build; the full model when None.
        balancer: observes the experts' routers; None for a dense model.
        on_parameter: called with each parameter as soon as it is materialized.
    """
    local_model = assemble(run, model, mesh, stage=stage, balancer=balancer)
    # alone on its stage, a tied head has another name in the module than the embedding it is a copy of
    names = {id(parameter): name for name, parameter in local_model.decoder.parameters_by_name().items()}
    materialize(
        local_model.decoder.causal,
        ShardedValues(values, local_model),
        device=device,
        on_parameter=on_parameter,
        names=names,
    )
    if local_model.tensor is not None:
        named = local_model.decoder.parameters_by_name()
        for name in local_model.tensor.boxes:
            named[name].tensor_model_parallel = True  # type: ignore[attr-defined]  # read by DeepSpeed's gradient norm
    return local_model


def zero3_sharder(config: dict[str, Any], unit: Any) -> Callable[[nn.Parameter], None]:
    """A callback that shards a parameter over the data group with ZeRO-3, as soon as it is materialized.

    Args:
        config: DeepSpeed's.
        unit: the model-parallel unit (mpu); None when all ranks are the data group.
    """
    group = None if unit is None else unit.get_data_parallel_group()

    def shard(parameter: nn.Parameter) -> None:
        module = nn.ParameterList([parameter])
        deepspeed.zero.Init(module=module, config_dict_or_path=config, data_parallel_group=group, mpu=unit)

    return shard
