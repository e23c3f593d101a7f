"""Gathers a user's tensors over all ranks, for metrics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.own_loop.batches import transformed


def gathered(values: Any, *, device: torch.device) -> Any:
    """Joins the tensors of all ranks along dim 0, in the order of ranks. Collective.

    Args:
        values: nested dicts, lists and tuples of tensors [B, ...], the same structure on all ranks; B may differ.
        device: this rank's device.
    """
    return transformed(values, lambda tensor: _gathered(tensor.detach().to(device)))


def _gathered(tensor: Tensor) -> Tensor:
    rows = tensor if tensor.ndim else tensor.view(1)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    sizes = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(rows)], device=rows.device))
    counts = [int(size) for size in sizes]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    everyone = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(everyone, padded)
    return torch.cat([each[:count] for each, count in zip(everyone, counts, strict=True)])
