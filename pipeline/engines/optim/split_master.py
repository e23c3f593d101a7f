"""fp32 master weights in four bytes: the bf16 weight with which the model computes, and a residual of 16 bits.

A bf16 number is the upper half of an fp32 number. The weight is the master rounded to the nearest bf16 number. The
residual is the difference of their bit patterns: the lower half of the master as a signed number. So weight and
residual together are the master, bit for bit, in 4 bytes per parameter instead of 6. A master exactly between two bf16
numbers is rounded away from zero. With torch's rule, rounding to even, different masters could have equal halves.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split(master: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Writes a master weight into its two halves, in place.

    Args:
        master: fp32, finite.
        weight: bf16, same shape; becomes the master rounded to nearest.
        residual: int16, same shape; becomes the residual.
    """
    bits = master.view(torch.int32)
    residual.copy_(bits)  # the lower half: torch wraps around
    rounded = bits + 0x8000
    weight.view(torch.int16).copy_(rounded.bitwise_right_shift_(16))


def joined(weight: Tensor, residual: Tensor) -> Tensor:
    """Joins a bf16 weight and its residual to the fp32 master weight."""
    bits = weight.float().view(torch.int32)
    return bits.add_(residual).view(torch.float32)
