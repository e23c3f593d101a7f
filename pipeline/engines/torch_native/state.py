"""The state of the native engine as named shards, and which of it other ranks hold too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.checkpoint import named_state
from pipeline.checkpoint.shards import NamedShard
from pipeline.engines.common import MOMENTS, ensure_state
from pipeline.engines.replica import Replica
from pipeline.engines.torch_native.sharding import Part
from pipeline.parallel.mesh import Mesh


@torch.no_grad()
def named_shards(parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> dict[str, NamedShard | Tensor]:
    """This rank's part of weights and moments, as views; and the optimizer's step, a copy."""
    named: dict[str, NamedShard | Tensor] = {}
    step = torch.zeros((), dtype=torch.float32)
    for part in parts:
        part.attach()
        state = ensure_state(optimizer, part.master)
        named[named_state.weight_key(part.name)] = part.named(part.master.data)
        for moment in MOMENTS:
            named[named_state.moment_key(moment, part.name)] = part.named(state[moment])
        step = state["step"].detach().to("cpu", copy=True)
    return {**named, named_state.OPTIMIZER_STEP: step}


@torch.no_grad()
def set_step(parts: Sequence[Part], optimizer: torch.optim.Optimizer, step: Tensor) -> None:
    """Sets AdamW's step counter everywhere."""
    for part in parts:
        ensure_state(optimizer, part.master)["step"].copy_(step)


@torch.no_grad()
def replicas(parts: Sequence[Part], mesh: Mesh, shared: dist.ProcessGroup | None) -> Iterator[Replica]:
    """The weights of this rank that other ranks hold too.

    Args:
        parts: of this rank.
        mesh: this rank's place.
        shared: the ranks that hold a parameter with this one, see `parallel.mesh.ends_group`.
    """
    tensor = mesh.group("tp")
    for part in parts:
        part.attach()
        sharded, values = part.sharded.data, part.master.data
        assert isinstance(sharded, DTensor)
        copies = sharded.device_mesh.get_group(0) if sharded.device_mesh.ndim == 2 else None
        groups = (copies, tensor if part.box is None else None, shared if part.shared else None)
        yield from (Replica(part.name, values, group) for group in groups if group is not None)
