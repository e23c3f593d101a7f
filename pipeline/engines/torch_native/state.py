"""The native engine's state dict as named shards, and the replicas of its weights on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.checkpoint import named_state
from pipeline.checkpoint.format.shards import NamedShard
from pipeline.config.sections.optimizers import OptimizerKind
from pipeline.engines.base import Replica
from pipeline.engines.optim.state import ensure_state, set_step_counter, step_counter
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.torch_native.sharding import ParameterShard


@torch.no_grad()
def named_shards(
    shards: Sequence[ParameterShard], optimizer: torch.optim.Optimizer, kind_of: Callable[[str], OptimizerKind]
) -> dict[str, NamedShard | Tensor]:
    """Returns this rank's shards of weights and optimizer states, as views, and a copy of the optimizer's step counter.

    Args:
        shards: this rank's shards.
        optimizer: optimizer of the shards' master weights.
        kind_of: function from a parameter's name to its kind of optimizer.
    """
    named: dict[str, NamedShard | Tensor] = {}
    state: dict[str, Tensor] = {}
    counts = False
    for shard in shards:
        shard.attach()
        kind = kind_of(shard.name)
        counts |= kind.counts_steps
        state = ensure_state(optimizer, shard.master, kind)
        values = (shard.master.data, *(state[name] for name in kind.states))
        for key, tensor in zip(named_state.parameter_keys(shard.name, kind), values, strict=True):
            named[key] = shard.named_shard(tensor)
    if counts:
        named[named_state.OPTIMIZER_STEP] = step_counter(state)
    return named


@torch.no_grad()
def set_step(
    shards: Sequence[ParameterShard],
    optimizer: torch.optim.Optimizer,
    kind_of: Callable[[str], OptimizerKind],
    step: object,
) -> None:
    """Sets the step counter of every shard; `step` is None for an optimizer without a counter."""
    for shard in shards:
        set_step_counter(ensure_state(optimizer, shard.master, kind_of(shard.name)), step)


@torch.no_grad()
def replicas(shards: Sequence[ParameterShard], mesh: Mesh, tied_group: dist.ProcessGroup | None) -> Iterator[Replica]:
    """Yields this rank's weights that other ranks have too.

    Args:
        shards: this rank's shards.
        mesh: this rank's coordinates and groups.
        tied_group: the two ranks with copies of tied weights; None if this rank has no copy.
    """
    tp_group = mesh.group("tp")
    for shard in sorted(shards, key=lambda each: each.name):  # stages have tied weights in another order
        shard.attach()
        sharded, values = shard.sharded.data, shard.master.data
        assert isinstance(sharded, DTensor)
        replicate_group = sharded.device_mesh.get_group(0) if sharded.device_mesh.ndim == 2 else None
        groups = (replicate_group, tp_group if shard.box is None else None, tied_group if shard.tied else None)
        yield from (Replica(shard.name, values, group) for group in groups if group is not None)
