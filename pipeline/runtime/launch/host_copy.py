"""Copies a few numbers between host and device; neither waits for the other until the numbers are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor | Sequence[float], device: torch.device) -> Tensor:
    """Copies a host tensor (or numbers, as fp64 [n]) to a device; to a GPU through page-locked memory."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    if not len(host):  # empty: avoids a needless copy
        return torch.empty(0, dtype=host.dtype, device=device)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class HostCopy:
    """A copy of a small tensor in page-locked memory, made in the order of the device's stream.

    Args:
        values: tensor of any shape, on any device; CPU values are available at once.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._copied = values, None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """Returns the values; waits for the device if necessary."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values
