"""FSDP2 sharding of parameters over the data ranks, at four levels numbered as DeepSpeed's ZeRO stages.

| stage | weights between steps | weights during a step | gradients | summed over the data ranks |
|---|---|---|---|---|
| 0 | unsharded | unsharded | unsharded | once per step |
| 1 | sharded | unsharded | unsharded | once per step |
| 2 | sharded | unsharded | sharded | after every micro-batch |
| 3 | sharded | gathered layer by layer | sharded | after every micro-batch |

fp32 master weights and the optimizer's states are sharded from stage 1 on. With hybrid sharding (HSDP) the replicas
all-reduce gradients once per step; at stage 3 with pipeline parallelism, after every micro-batch. With pipeline
parallelism stages 1 and 2 are the same (see `torch_native.pipeline`). `fsdp_units` defines the units of gathering.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.sections.run import Fp8Section
from pipeline.engines.optim.matrix_exchange import Form, HeldShard
from pipeline.engines.parallel.activation_checkpointing import not_restored
from pipeline.engines.parallel.assemble import LocalModel, ShardedValues
from pipeline.engines.parallel.decoder import Decoder
from pipeline.engines.parallel.experts import expert_modules
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.torch_native.fp8_gather import gather_in_fp8, unwrapped, wrapped_like
from pipeline.engines.torch_native.fsdp_units import (
    Units,
    prefetch_explicitly,
    reshard_within_node,
    sharded_modules,
    units_of,
)
from pipeline.models.construction.buffers import fill_buffers
from pipeline.models.construction.initial_values import ParameterValues
from pipeline.models.construction.rectangle import Rectangle


@dataclass(frozen=True)
class ParameterShard:
    """This rank's shard of a parameter: complete rows of the tensor- or expert-parallel shard, or a box of experts.

    Attributes:
        name: Hugging Face name.
        shape: shape of the full parameter.
        box: tensor- or expert-parallel shard, or FSDP2's part of it on this rank; None without such a shard.
        start: first flat index within the box.
        sharded: FSDP2's parameter.
        master: fp32 master weight in the same memory, which the optimizer updates.
        counts_in_norm: whether the gradient enters the global norm on this rank; its replicas' gradients do not.
        tied: whether another pipeline stage has a tied copy.
        partial_gradient: whether the gradient must be summed over the tensor-parallel ranks.
    """

    name: str
    shape: tuple[int, ...]
    box: Rectangle | None
    start: int
    sharded: nn.Parameter
    master: nn.Parameter
    counts_in_norm: bool
    tied: bool
    partial_gradient: bool

    @torch.no_grad()
    def attach(self) -> None:
        """Makes the master weight use the shard's memory and, after a backward pass, gradient: FSDP2 may move both."""
        self.master.data = _local(self.sharded)
        self.master.grad = None if self.sharded.grad is None else _local(self.sharded.grad)

    def clear_gradient(self) -> None:
        """Frees the gradient."""
        self.master.grad = self.sharded.grad = None

    def held(self, form: Form) -> HeldShard[Form]:
        """Returns the shard in the form for a `MatrixExchange`, with the parameter's form."""
        return HeldShard(self.name, form, self.box, self.start, offset=0, length=self.master.numel())

    def named_shard(self, values: Tensor) -> NamedShard:
        """Makes the named shard of values with the master weight's layout: the weight itself or an optimizer state."""
        return NamedShard(self.shape, start=self.start, values=values.view(-1), box=self.box)


@dataclass(frozen=True)
class Sharding:
    """Settings of a decoder's sharding.

    Attributes:
        stage: ZeRO stage.
        dtype: dtype of forward and backward passes; the parameters are fp32.
        fp8: whether weights are gathered in fp8.
        reduce_dtype: dtype in which gradients are summed over the data ranks.
    """

    stage: int
    dtype: torch.dtype
    fp8: Fp8Section
    reduce_dtype: torch.dtype

    def reshard_after_forward(self, unit: tuple[nn.Module, ...], units: Units) -> bool:
        """Decides whether a unit's weights are sharded again after its forward pass."""
        return self.stage == 3 and unit is not units.end  # the head's backward pass directly follows its forward pass

    def policy(self) -> MixedPrecisionPolicy:
        """Returns FSDP2's mixed precision policy."""
        mixed = self.dtype != torch.float32
        dtypes: dict[str, Any] = {"param_dtype": self.dtype, "reduce_dtype": self.reduce_dtype} if mixed else {}
        return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)


def shard_decoder(
    local_model: LocalModel,
    values: ParameterValues,
    mesh: Mesh,
    *,
    root: nn.Module,
    sharding: Sharding,
    device: torch.device,
) -> list[ParameterShard]:
    """Shards a decoder on meta in place and materializes it; memory never exceeds a rank's shards plus one parameter.

    Gradients are summed, not averaged: the loss is divided by the targets of the whole step.

    Args:
        local_model: this rank's part of the model.
        values: values of the full parameters.
        mesh: this rank's coordinates and groups.
        root: the FSDP2 root module: the decoder, or the stage module around it.
        sharding: settings of the sharding.
        device: this rank's device.

    Returns:
        This rank's shard of every parameter of the decoder.
    """
    fill_buffers(local_model.decoder.causal, device, values)
    for parameter in root.parameters():
        parameter.data = parameter.data.to(torch.float32)
    sharding_mesh = mesh.sharding_mesh()
    gather_in_fp8(local_model.decoder, sharding.fp8, shards=sharding_mesh.size(sharding_mesh.ndim - 1))
    units = units_of(local_model.decoder.causal)
    if local_model.experts:
        _shard_experts(local_model.decoder, mesh, sharding)
    options: dict[str, Any] = {"mesh": sharding_mesh, "mp_policy": sharding.policy()}
    for unit in units.ordered():
        modules: Any = list(unit) if len(unit) > 1 else unit[0]
        fully_shard(modules, reshard_after_forward=sharding.reshard_after_forward(unit, units), **options)
    fully_shard(root, reshard_after_forward=False, **options)
    if mesh.nodes is not None:
        for unit in units.layers:
            reshard_within_node(unit, mesh.nodes)
    prefetch_explicitly(root, units)
    for module in sharded_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    _materialize(local_model, values, device)
    return [_parameter_shard(name, local_model, mesh) for name in local_model.decoder.parameters_by_name()]


def reshard(root: nn.Module) -> None:
    """Frees gathered weights, so that the next forward pass gathers them again."""
    for module in sharded_modules(root):
        module.reshard()


def _shard_experts(decoder: Decoder, mesh: Mesh, sharding: Sharding) -> None:
    """Makes each layer's experts a separate unit, sharded over the ranks that have the same experts.

    Whole experts are sharded (dim 0), or parts of each (dim 1) if there are more ranks than experts.
    """
    expert_mesh = mesh.expert_sharding_mesh()
    ranks = expert_mesh.size(expert_mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        experts, *rest = parameter.shape
        return Shard(1) if ranks > experts and rest[0] % ranks == 0 else None

    for _, module in expert_modules(decoder):
        fully_shard(
            module,
            mesh=expert_mesh,
            mp_policy=sharding.policy(),
            reshard_after_forward=sharding.stage == 3,
            shard_placement_fn=placement,
        )
        module.register_forward_pre_hook(_begin_backward, prepend=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # what runs is not known when a graph is made
def _begin_backward(experts: Any, _args: Any) -> None:
    """Puts the unit of a layer's experts into its backward state in a recomputation.

    FSDP2 does so when the gradient of the experts' output exists, but shared experts, whose output is added, may be
    recomputed before that. Then FSDP2 would gather the unit that is next in a forward pass.
    """
    if torch._C._current_graph_task_id() != -1:
        with not_restored():
            experts._get_fsdp_state()._pre_backward(None)


@torch.no_grad()
def _materialize(local_model: LocalModel, values: ParameterValues, device: torch.device) -> None:
    decoder, sharded_values = local_model.decoder, ShardedValues(values, local_model)
    on_meta: dict[str, Any] = dict(decoder.parameters_by_name())
    for name, old in on_meta.items():
        local = sharded_values.value(name, box=_own_part(old), device=device)
        placement = (old.device_mesh, old.placements)
        local = wrapped_like(local, old.to_local())
        real = DTensor.from_local(local, *placement, run_check=False, shape=old.shape, stride=old.stride())
        decoder.set_parameter(name, nn.Parameter(real, requires_grad=old.requires_grad))


def _parameter_shard(name: str, local_model: LocalModel, mesh: Mesh) -> ParameterShard:
    sharded: Any = local_model.decoder.parameters_by_name()[name]
    box, tied, tensor = local_model.box(name), name in local_model.tied, local_model.tensor
    first_replica = sharded.device_mesh.ndim == 1 or sharded.device_mesh.get_local_rank(0) == 0
    own, start = _own_part(sharded), 0
    if sharded.placements[-1].dim == 0:
        start = own.offsets[0] * math.prod(sharded.shape[1:])
    else:
        box = own.shifted(box.offsets if box else (0,) * len(own.sizes))
    return ParameterShard(
        name=name,
        shape=local_model.shapes[name],
        box=box,
        start=start,
        sharded=sharded,
        master=nn.Parameter(_local(sharded), requires_grad=sharded.requires_grad),
        counts_in_norm=first_replica
        and (box is not None or mesh.coordinates["tp"] == 0)
        and (not tied or local_model.decoder.layout.first),
        tied=tied,
        partial_gradient=tensor is not None and name in tensor.partial_gradients,
    )


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return unwrapped(local.detach())


def _own_part(sharded: DTensor) -> Rectangle:
    """Returns this rank's part of a tensor that FSDP2 shards like `torch.chunk`: equal parts but the last."""
    mesh, placement = sharded.device_mesh, sharded.placements[-1]
    assert isinstance(placement, Shard)
    length = sharded.shape[placement.dim]
    first = min(length, -(-length // mesh.size(mesh.ndim - 1)) * mesh.get_local_rank(mesh.ndim - 1))
    offsets = [0] * sharded.ndim
    offsets[placement.dim] = first
    return Rectangle(tuple(offsets), tuple(sharded.to_local().shape))
