"""Tokens and first weights: the same for every contestant, and generated without a file."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from benchmarks.gpu_check.cases import Size


def draw(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Draws a parameter's first value on the device: fp32, normal with deviation 0.02, or ones for norms."""
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    return torch.empty(shape, device=device).normal_(0.0, 0.02, generator=generator)


def tokens(size: Size, step: int) -> Tensor:
    """Token ids of a step: int64 [samples, sequence + 1], on the CPU, from a tenth of the vocabulary."""
    generator = torch.Generator().manual_seed(step)
    shape = (size.samples, size.sequence + 1)
    return torch.randint(0, max(8, size.model["vocab_size"] // 10), shape, generator=generator)
