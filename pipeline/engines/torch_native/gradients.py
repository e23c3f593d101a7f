"""The gradient of a whole step, spread over ranks: what is still to be added up, and its norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipeline.engines.torch_native.sharding import Part
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.tensor import sum_gradients


@torch.no_grad()
def complete(parts: Sequence[Part], mesh: Mesh, shared: dist.ProcessGroup | None) -> None:
    """After the backward passes: attaches gradients to the masters and adds up what FSDP2 has not.

    Args:
        parts: of this rank.
        mesh: this rank's place.
        shared: the ranks that hold a parameter with this one, see `parallel.mesh.ends_group`.
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
