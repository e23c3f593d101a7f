"""A teacher's layers sharded over the data ranks (FSDP2): each is gathered before it is computed, and freed after.

Every data rank has the parts outside of layers (embedding, final norm and head), so the head can compute the logits
chunk by chunk. Every data rank runs the teacher equally often, as the student's engine ensures.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from pipeline.engines.parallel.assemble import LocalModel, ShardedValues
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.torch_native.fsdp_units import layer_units
from pipeline.models.construction.buffers import fill_buffers
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.rectangle import Rectangle


@torch.no_grad()
def shard_layers(local: LocalModel, values: ParameterValues, mesh: Mesh, *, device: torch.device) -> None:
    """Shards the layers of a decoder on meta and materializes it. A rank holds at most its part and one parameter.

    Args:
        local: the teacher in this rank's tensor and context parallelism; changed in place.
        values: values of its full parameters.
        mesh: this rank's coordinates and groups.
    """
    decoder = local.decoder
    decoder.requires_grad_(False)
    fill_buffers(decoder.causal, device, values)
    units = layer_units(decoder.causal)
    for unit in units:
        modules: Any = unit if len(unit) > 1 else unit[0]
        fully_shard(modules, mesh=mesh.data_mesh(), reshard_after_forward=True)
    in_layers = {parameter for unit in units for layer in unit for parameter in layer.parameters()}
    others = {parameter for parameter in decoder.parameters() if parameter not in in_layers}
    fully_shard(decoder, mesh=mesh.data_mesh(), reshard_after_forward=True, ignored_params=others)
    register_fsdp_forward_method(decoder, "hidden_states")  # runs the root's hooks around it, as around `forward`
    sharded = ShardedValues(values, local)
    for name, old in dict(decoder.parameters_by_name()).items():
        decoder.set_parameter(name, nn.Parameter(_value(name, old, sharded, device), requires_grad=False))
    heads = [unit[0] for unit in units]
    for before, after in pairwise(heads):
        assert isinstance(before, FSDPModule)
        assert isinstance(after, FSDPModule)
        before.set_modules_to_forward_prefetch([after])


def _value(name: str, on_meta: nn.Parameter, values: ShardedValues, device: torch.device) -> torch.Tensor:
    if not isinstance(on_meta, DTensor):
        return values.value(name, device=device).to(on_meta.dtype)
    old: Any = on_meta
    data = old.device_mesh
    size = -(-old.shape[0] // data.size())
    first = min(old.shape[0], size * data.get_local_rank())
    rows = Rectangle.full(old.shape).rows(first, old.to_local().shape[0])
    part = values.value(name, box=rows, device=device).to(old.dtype)
    return DTensor.from_local(part, data, old.placements, run_check=False, shape=old.shape, stride=old.stride())
