"""fp32 master weights in four bytes: the bf16 weight that the model computes with, and the 16 bits that it lacks.

A bf16 number is the upper half of an fp32 number. The weight is the master rounded to the nearest bf16, and the lower
half of the master, as a signed number, is the difference of their bit patterns. So a weight and its residual are the
master, bit for bit, and there is no third copy: 4 bytes per parameter instead of 6. A master exactly between two bf16
numbers is rounded away from zero, where torch rounds to the even one: with that rule the two halves of different
masters would be the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split(master: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Writes a master weight into its two halves, in place.

    Args:
        master: fp32, finite.
        weight: bf16, of the same shape: becomes the master rounded to the nearest.
        residual: int16, of the same shape.
    """
    bits = master.view(torch.int32)
    residual.copy_(bits)  # the lower half: torch wraps around
    rounded = bits + 0x8000
    weight.view(torch.int16).copy_(rounded.bitwise_right_shift_(16))


def joined(weight: Tensor, residual: Tensor) -> Tensor:
    """The fp32 master weight of a bf16 weight and its residual."""
    bits = weight.float().view(torch.int32)
    return bits.add_(residual).view(torch.float32)
