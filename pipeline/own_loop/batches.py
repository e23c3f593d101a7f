"""What a batch of somebody else's loader may be: tensors in dicts, lists, tuples and objects that can be moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def transformed(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; what holds no tensors stays as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: transformed(value, change) for key, value in batch.items()}
        if isinstance(batch, dict) and type(batch) is not dict:
            # Hugging Face's outputs and encodings are dicts with attributes: they are made anew from their fields
            return type(batch)(**changed)
        return changed if isinstance(batch, dict) else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(transformed(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(transformed(value, change) for value in batch)
    return batch


def samples_in(batch: Any) -> int:
    """Samples of a batch: the length of its tensors' first dim. 0 when it holds no tensors."""
    sizes: list[int] = []

    def measure(tensor: Tensor) -> Tensor:
        sizes.append(len(tensor) if tensor.ndim else 0)
        return tensor

    transformed(batch, measure)
    return sizes[0] if sizes else 0


def part_of(batch: Any, where: slice) -> Any:
    """Some of the samples of a batch, as views."""
    return transformed(batch, lambda tensor: tensor[where] if tensor.ndim else tensor)


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on a device."""
    if device.type == "cpu":
        return batch
    return transformed(batch, lambda tensor: tensor.to(device, non_blocking=True))


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in another dtype; labels and ids stay whole numbers."""
    return transformed(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
