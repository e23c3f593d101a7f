"""Completes the gradient reduction after a step's backward passes; computes a rank's share of the global norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.tensor import all_reduce_gradients
from pipeline.engines.torch_native.sharding import ParameterShard


@torch.no_grad()
def finish_reduction(
    shards: Sequence[ParameterShard],
    mesh: Mesh,
    tied_group: dist.ProcessGroup | None,
    *,
    copies: Sequence[tuple[ParameterShard, ParameterShard]] = (),
) -> None:
    """Attaches the backward passes' gradients to the master weights; all-reduces gradients that FSDP2 does not reduce.

    FSDP2 does not reduce partial gradients of tensor parallelism, nor gradients of weights tied across pipeline stages.

    Args:
        shards: this rank's shards.
        mesh: this rank's coordinates and groups.
        tied_group: the two ranks with copies of tied weights; None if this rank has no copy.
        copies: (shard, its copy in another stage of this rank) of tied weights; the copies are not among `shards`.
    """
    for shard in shards:
        shard.attach()
    for shard, copy in copies:
        copy.attach()
        if copy.master.grad is not None:
            attached([shard])  # zeros where only the copy's stage has used the weight
            assert shard.master.grad is not None
            shard.master.grad += copy.master.grad
    tp_group = mesh.group("tp")
    if tp_group is not None:
        all_reduce_gradients([g for s in shards if s.partial_gradient and (g := s.master.grad) is not None], tp_group)
    if tied_group is not None:
        by_name = sorted((s for s in shards if s.tied), key=lambda s: s.name)  # stages have them in another order
        all_reduce_gradients(attached(by_name), tied_group)  # zeros where only the other stage uses a weight


@torch.no_grad()
def attached(shards: Sequence[ParameterShard]) -> list[Tensor]:
    """Returns this rank's gradient shards of all trained parameters, fp32, before `finish_reduction`.

    They are zeros for parameters without a backward pass. Writing into them changes the gradients.
    """
    found: list[Tensor] = []
    for shard in shards:
        if shard.sharded.requires_grad and shard.sharded.grad is None:
            shard.sharded.grad = torch.zeros_like(shard.sharded)
        shard.attach()
        if shard.master.grad is not None:
            found.append(shard.master.grad)
    return found


@torch.no_grad()
def own_square(shards: Sequence[ParameterShard], device: torch.device) -> Tensor:
    """Returns this rank's share of the gradient's squared 2-norm, fp64 scalar; each element counts on one rank."""
    gradients = [g for s in shards if s.counts_in_norm and (g := s.master.grad) is not None and g.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()
