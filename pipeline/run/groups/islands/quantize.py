"""Symmetric int8 quantization of flat tensors in blocks, each with an fp32 scale."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Number of values that share a scale: 4 bytes of scale for 256 bytes of values."""


def quantize(values: Tensor) -> Tensor:
    """Rounds to the nearest of 255 levels between -max and max of each block.

    Args:
        values: fp32 [n], n a multiple of `BLOCK`.

    Returns:
        uint8 [n / BLOCK, BLOCK + 4]: the int8 values of a block and the bytes of its scale.
    """
    blocks = values.view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    # a block of zeros, or of values whose scale underflows, is all zeros
    levels = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([levels.view(torch.uint8), scale.contiguous().view(torch.uint8)], dim=1)


def dequantize(packed: Tensor) -> Tensor:
    """Inverts `quantize`, except for the rounding.

    Args:
        packed: uint8 [n / BLOCK, BLOCK + 4].

    Returns:
        fp32 [n].
    """
    levels = packed[:, :BLOCK].contiguous().view(torch.int8).float()
    scale = packed[:, BLOCK:].contiguous().view(torch.float32)
    return (levels * scale).view(-1)
