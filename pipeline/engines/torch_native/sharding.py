"""How parameters are sharded over the data ranks: FSDP2, in four degrees that go by DeepSpeed's stage numbers.

| stage | weights between steps | weights during a step | gradients | summed over the data ranks |
|---|---|---|---|---|
| 0 | whole | whole | whole | once per step |
| 1 | sharded | whole | whole | once per step |
| 2 | sharded | whole | sharded | after every micro-batch |
| 3 | sharded | whole for the time of a layer | sharded | after every micro-batch |

fp32 weights and the optimizer's moments are sharded from stage 1 on. With hybrid sharding the copies are summed once
per step, but in a pipeline at stage 3 after every micro-batch. In a pipeline stages 1 and 2 are one
(`torch_pipeline`). Every decoder layer is one message; what is left (embedding, final norm, head) is another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.checkpoint.shards import NamedShard, Rectangle
from pipeline.models.materialise import fill_buffers
from pipeline.models.values import ParameterValues
from pipeline.parallel.assemble import Assembled, ShardedValues
from pipeline.parallel.mesh import Mesh


@dataclass(frozen=True)
class Part:
    """This rank's part of a parameter: whole rows of what tensor parallelism left of it.

    Attributes:
        name: Hugging Face name.
        shape: of the full parameter.
        box: what tensor parallelism left of it; None for all of it.
        start: first flat index within the box.
        sharded: the parameter as FSDP2 keeps it.
        master: fp32, of the same memory; what the optimizer updates.
        counted: its gradient enters the norm here; its other copies do not.
        shared: another pipeline stage holds it too.
        summed: its gradient is to be added up over the tensor-parallel ranks.
    """

    name: str
    shape: tuple[int, ...]
    box: Rectangle | None
    start: int
    sharded: nn.Parameter
    master: nn.Parameter
    counted: bool
    shared: bool
    summed: bool

    @torch.no_grad()
    def attach(self) -> None:
        """Gives the master its memory and, after a backward pass, its gradient: FSDP2 may move both."""
        self.master.data = _local(self.sharded)
        self.master.grad = None if self.sharded.grad is None else _local(self.sharded.grad)

    def detach(self) -> None:
        """Forgets the gradient."""
        self.master.grad = self.sharded.grad = None

    def named(self, values: Tensor) -> NamedShard:
        """The named shard of values that lie as the master does."""
        return NamedShard(self.shape, start=self.start, values=values.view(-1), box=self.box)


def shard(
    assembled: Assembled,
    values: ParameterValues,
    mesh: Mesh,
    *,
    root: nn.Module,
    stage: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Part]:
    """Shards a decoder on meta in place and gives it its values. No rank holds more than its parts and one parameter.

    Gradients are summed in fp32, not averaged: the loss is divided by the targets of the whole step.

    Args:
        assembled: what this rank computes.
        values: of the whole parameters.
        mesh: this rank's place.
        root: the decoder, or a module around it; the one that is called.
        stage: see above.
        dtype: what is computed in; the parameters are fp32.
        device: of this rank.

    Returns:
        This rank's part of every parameter of the decoder.
    """
    fill_buffers(assembled.decoder.causal, device)
    for parameter in root.parameters():
        parameter.data = parameter.data.to(torch.float32)
    mixed: dict[str, Any] = {"param_dtype": dtype, "reduce_dtype": torch.float32} if dtype != torch.float32 else {}
    policy = MixedPrecisionPolicy(**mixed, cast_forward_inputs=False)
    for layer in [m for m in root.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh.sharding(), reshard_after_forward=stage == 3, mp_policy=policy)
    fully_shard(root, mesh=mesh.sharding(), reshard_after_forward=False, mp_policy=policy)
    for module in sharded_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    _materialise(assembled, values, device)
    return [_part(name, assembled, mesh) for name in assembled.decoder.named()]


def sharded_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """The modules whose parameters travel together."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def reshard(root: nn.Module) -> None:
    """Drops whole weights, so that the next forward pass gathers them anew."""
    for module in sharded_modules(root):
        module.reshard()


@torch.no_grad()
def _materialise(assembled: Assembled, values: ParameterValues, device: torch.device) -> None:
    decoder, cut = assembled.decoder, ShardedValues(values, assembled)
    on_meta: dict[str, Any] = dict(decoder.named())
    for name, old in on_meta.items():
        local = _rows(cut.value(name), old).to(device, copy=True)
        where = (old.device_mesh, old.placements)
        real = DTensor.from_local(local, *where, run_check=False, shape=old.shape, stride=old.stride())
        decoder.put(name, nn.Parameter(real, requires_grad=old.requires_grad))


def _part(name: str, assembled: Assembled, mesh: Mesh) -> Part:
    sharded: Any = assembled.decoder.named()[name]
    box, shared, tensor = assembled.box(name), name in assembled.shared, assembled.tensor
    first_copy = sharded.device_mesh.ndim == 1 or sharded.device_mesh.get_local_rank(0) == 0
    return Part(
        name=name,
        shape=assembled.shapes[name],
        box=box,
        start=_first_row(sharded) * math.prod(sharded.shape[1:]),
        sharded=sharded,
        master=nn.Parameter(_local(sharded), requires_grad=sharded.requires_grad),
        counted=first_copy
        and (box is not None or mesh.place["tp"] == 0)
        and (not shared or assembled.decoder.form.first),
        shared=shared,
        summed=tensor is not None and name in tensor.summed,
    )


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local.detach()


def _first_row(sharded: DTensor) -> int:
    """FSDP2 cuts rows as `torch.chunk` does: all parts are of one size, but for what the last ones lack."""
    mesh = sharded.device_mesh
    size = -(-sharded.shape[0] // mesh.size(mesh.ndim - 1))
    return min(sharded.shape[0], size * mesh.get_local_rank(mesh.ndim - 1))


def _rows(whole: Tensor, sharded: DTensor) -> Tensor:
    """This rank's rows of a parameter that tensor parallelism has cut already."""
    first = _first_row(sharded)
    return whole[first : first + sharded.to_local().shape[0]]
