"""Moves, slices and casts batches of a user's loader: nested dicts, lists and tuples of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def transformed(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies `change` to every tensor of a nested structure; other values stay as they are."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: transformed(value, change) for key, value in batch.items()}
        if isinstance(batch, dict) and type(batch) is not dict:
            # Hugging Face's outputs and encodings are dicts with attributes: they are rebuilt from their fields
            return type(batch)(**changed)
        return changed if isinstance(batch, dict) else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(transformed(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(transformed(value, change) for value in batch)
    return batch


def samples_in(batch: Any) -> int:
    """Batch size: length of the tensors' first dim; 0 without tensors."""
    sizes: list[int] = []

    def measure(tensor: Tensor) -> Tensor:
        sizes.append(len(tensor) if tensor.ndim else 0)
        return tensor

    transformed(batch, measure)
    return sizes[0] if sizes else 0


def part_of(batch: Any, where: slice) -> Any:
    """A slice of the samples of a batch, as views."""
    return transformed(batch, lambda tensor: tensor[where] if tensor.ndim else tensor)


def moved(batch: Any, device: torch.device) -> Any:
    """Copies the batch to a device."""
    if device.type == "cpu":
        return batch
    return transformed(batch, lambda tensor: tensor.to(device, non_blocking=True))


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors of a batch; integer labels and ids stay as they are."""
    return transformed(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


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
