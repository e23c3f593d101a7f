"""Rounds to the numbers that a quantization stores: signed integers or e4m3, times a scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Rounding = Callable[[Tensor, Tensor], Tensor]
"""Function (weights, scales) -> nearest numbers that can be stored, in the same shape."""


@cache
def integers(bits: int) -> Rounding:
    """Returns the function that rounds to signed integers of `bits` bits times the scale, always the same object."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return lambda weight, scale: (weight / scale).round().clamp(lowest, highest) * scale


def e4m3(weight: Tensor, scale: Tensor) -> Tensor:
    """Rounds to e4m3 times the scale."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).clamp(-limit, limit).to(torch.float8_e4m3fn).to(weight.dtype) * scale
