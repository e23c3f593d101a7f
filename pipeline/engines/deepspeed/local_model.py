"""Builds this rank's part of the model for DeepSpeed: assembled, materialized, and marked as DeepSpeed expects."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import nn

from pipeline.config.rules.resolve import ResolvedRun
from pipeline.engines.deepspeed.experts import mark_expert, set_expert_groups
from pipeline.engines.parallel.assemble import LocalModel, ShardedValues, assemble
from pipeline.engines.parallel.expert_balance import ExpertBalancer
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.stages import StageLayers
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.rectangle import Rectangle


@dataclass(frozen=True)
class Zero3:
    """Settings with which ZeRO-3 shards a parameter over the data group.

    Attributes:
        config: DeepSpeed's own config.
        unit: the model-parallel unit (mpu); None if the data group consists of all ranks.
    """

    config: dict[str, Any]
    unit: Any


def build_local_model(
    run: ResolvedRun,
    model: nn.Module,
    values: ParameterValues,
    mesh: Mesh | None,
    *,
    device: torch.device,
    stage: StageLayers | None = None,
    balancer: ExpertBalancer | None = None,
    zero3: Zero3 | None = None,
) -> LocalModel:
    """Builds and materializes this rank's part of the model; memory never exceeds this part plus one parameter.

    Args:
        run: the resolved config.
        model: the full model, on meta.
        values: initial values of its parameters.
        mesh: this rank's coordinates and groups; None for one process.
        device: this rank's device.
        stage: the pipeline stage to build; None for the full model.
        balancer: balancer that observes the experts' routers; None for a dense model.
        zero3: settings with which every parameter is sharded over its data ranks; None for other ZeRO stages.
    """
    set_expert_groups(mesh)
    local_model = assemble(run, model, mesh, stage=stage, balancer=balancer)
    # a tied head on a stage without the embedding has another name in the module than the embedding that it copies
    names = {id(parameter): name for name, parameter in local_model.decoder.parameters_by_name().items()}
    sharded = ShardedValues(values, local_model)
    make = None if zero3 is None else partial(_zero3_parameter, sharded, device, zero3, local_model.experts.keys())
    materialize(local_model.decoder.causal, sharded, device=device, make=make, names=names)
    named = local_model.decoder.parameters_by_name()
    for name in local_model.experts:
        mark_expert(named[name])
    if local_model.tensor is not None:
        for name in local_model.tensor.boxes:
            named[name].tensor_model_parallel = True  # type: ignore[attr-defined]  # read by DeepSpeed's gradient norm
    return local_model


def _zero3_parameter(
    values: ParameterValues,
    device: torch.device,
    zero3: Zero3,
    experts: Collection[str],
    name: str,
    on_meta: nn.Parameter,
) -> nn.Parameter:
    """Makes a parameter that ZeRO-3 shards over the data group, or over the ranks that have the same experts.

    Only this rank's partition is computed.
    """
    full = torch.empty(on_meta.shape, dtype=on_meta.dtype, device=device)
    parameter = nn.Parameter(full, requires_grad=on_meta.requires_grad)
    if name in experts:
        mark_expert(parameter)
    secondary = zero3.config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
    _OwnPartition(
        module=nn.ParameterList([parameter]),
        config_dict_or_path=zero3.config,
        data_parallel_group=None if zero3.unit is None else zero3.unit.get_data_parallel_group(),
        mpu=zero3.unit,
        # hpZ: None for the first parameter, at which DeepSpeed creates the group; it refuses to create it again
        zero_param_parallel_group=groups._get_zero_param_intra_parallel_group() if secondary else None,
        fill=partial(_fill, values, name, device),
        whole=secondary,
    )
    return parameter


class _OwnPartition(deepspeed.zero.Init):  # type: ignore[misc]
    """`zero.Init` for parameters whose values every rank can compute: nothing is broadcast.

    Args:
        fill: function that writes values into a parameter, from one flat index to another.
        whole: whether all values are needed: besides this rank's partition, hpZ needs the partition within a node.
    """

    def __init__(self, *, fill: Callable[[torch.Tensor, int, int], None], whole: bool, **arguments: Any) -> None:
        self._fill_range, self._whole = fill, whole
        super().__init__(**arguments)

    def _zero_init_param(self, param: Any) -> None:
        self._convert_to_deepspeed_param(param)
        size = self._aligned_size(param) // self._partition_world_size(param)
        start = min(size * self._partition_rank(param), param.numel())
        own = (0, param.numel()) if self._whole else (start, min(start + size, param.numel()))
        self._fill_range(param.data, *own)
        param.partition()


def _fill(values: ParameterValues, name: str, device: torch.device, full: torch.Tensor, start: int, stop: int) -> None:
    """Writes the values from one flat index to another into a parameter; computes only the rows that contain them."""
    if start == stop:
        return
    if not full.ndim:
        full.copy_(values.value(name, device=device))
        return
    row = full[0].numel()
    first, end = start // row, -(-stop // row)
    rows = values.value(name, box=Rectangle.full(full.shape).rows(first, end - first), device=device)
    full.view(-1)[start:stop] = rows.view(-1)[start - first * row : stop - first * row]
