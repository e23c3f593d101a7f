"""The gradient of a whole step, spread over ranks: what is still to be added up, and its norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipeline.engines.torch_sharding import Part
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.tensor import sum_gradients


def holders_of_shared(mesh: Mesh) -> dist.ProcessGroup | None:
    """The group of the first and the last pipeline rank, who may hold a parameter both (a head tied to the embedding).

    Collective. None where there is no pipeline, and on the ranks in the middle.
    """
    own: dist.ProcessGroup | None = None
    for rank in range(mesh.topology.world_size if mesh.topology.pp > 1 else 0):
        if mesh.topology.coordinates(rank)["pp"] == 0:
            column = mesh.topology.group(rank, "pp")
            ends = [column[0], column[-1]]
            group = dist.new_group(ends)
            own = group if mesh.rank in ends else own
    return own


@torch.no_grad()
def complete(parts: Sequence[Part], mesh: Mesh, shared: dist.ProcessGroup | None) -> None:
    """After the backward passes: attaches gradients to the masters and adds up what FSDP2 has not.

    Args:
        parts: of this rank.
        mesh: this rank's place.
        shared: see `holders_of_shared`.
    """
    for part in parts:
        part.attach()
    tensor = mesh.group("tp")
    if tensor is not None:
        sum_gradients([g for p in parts if p.summed and (g := p.master.grad) is not None], tensor)
    if shared is not None:
        sum_gradients([g for p in parts if p.shared and (g := p.master.grad) is not None], shared)


@torch.no_grad()
def norm(parts: Sequence[Part], device: torch.device) -> float:
    """2-norm of the gradient over all ranks, each element counting once; the same number on every rank."""
    gradients = [g for p in parts if p.counted and (g := p.master.grad) is not None and g.numel()]
    square = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        square += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    dist.all_reduce(square)
    return float(square.sqrt())
