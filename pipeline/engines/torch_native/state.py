"""The native engine's state dict as named shards, and the replicas of its weights on other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.checkpoint import named_state
from pipeline.checkpoint.shards import NamedShard
from pipeline.engines.base import Replica
from pipeline.engines.common import MOMENTS, ensure_adamw_state
from pipeline.engines.torch_native.sharding import ParameterShard
from pipeline.parallel.mesh import Mesh


@torch.no_grad()
def named_shards(shards: Sequence[ParameterShard], optimizer: torch.optim.Optimizer) -> dict[str, NamedShard | Tensor]:
    """This rank's shards of weights and moments, as views; and the optimizer's step counter, a copy."""
    named: dict[str, NamedShard | Tensor] = {}
    step = torch.zeros((), dtype=torch.float32)
    for shard in shards:
        shard.attach()
        state = ensure_adamw_state(optimizer, shard.master)
        named[named_state.weight_key(shard.name)] = shard.named_shard(shard.master.data)
        for moment in MOMENTS:
            named[named_state.moment_key(moment, shard.name)] = shard.named_shard(state[moment])
        step = state["step"].detach().to("cpu", copy=True)
    return {**named, named_state.OPTIMIZER_STEP: step}


@torch.no_grad()
def set_step(shards: Sequence[ParameterShard], optimizer: torch.optim.Optimizer, step: Tensor) -> None:
    """Sets AdamW's step counter of every shard."""
    for shard in shards:
        ensure_adamw_state(optimizer, shard.master)["step"].copy_(step)


@torch.no_grad()
def replicas(shards: Sequence[ParameterShard], mesh: Mesh, tied_group: dist.ProcessGroup | None) -> Iterator[Replica]:
    """The weights of this rank that other ranks hold too.

    Args:
        shards: of this rank.
        mesh: this rank's coordinates and groups.
        tied_group: see `parallel.mesh.tied_weights_group`.
    """
    tp_group = mesh.group("tp")
    for shard in shards:
        shard.attach()
        sharded, values = shard.sharded.data, shard.master.data
        assert isinstance(sharded, DTensor)
        replicate_group = sharded.device_mesh.get_group(0) if sharded.device_mesh.ndim == 2 else None
        groups = (replicate_group, tp_group if shard.box is None else None, tied_group if shard.tied else None)
        yield from (Replica(shard.name, values, group) for group in groups if group is not None)
