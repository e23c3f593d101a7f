"""fp32 numbers in 8 bits: logarithmic codes with one scale per block of 256 numbers, rounded stochastically.

The scale is the largest absolute value of the block. Each level is smaller than the one above by 2^(1/8), and 0 has its
own level. Unsigned numbers have 255 levels, 31.75 octaves; signed numbers have 127, 15.75 octaves. The second moment
averages squares of the gradients that the first moment averages, so both cover gradients that differ by a factor of
some 55,000 within a block. Linear codes would cover a factor of 127. Block-wise scales: Dettmers et al. 2022, 8-bit
Optimizers (arXiv:2110.02861), section 2.

Encoding decoded numbers gives the same codes and scales: the largest number of a block always has the top level.

Shapes: N numbers, ceil(N / 256) scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config.sections.optimizers import CODE_BLOCK

_PER_OCTAVE = 8
_SIGN = 0x80
_TINY = torch.finfo(torch.float32).tiny


def encode(values: Tensor, *, signed: bool, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rounds numbers to codes.

    Unsigned numbers below the lowest level are rounded up to it: if an `exp_avg_sq` became 0, AdamW would divide by
    almost 0.

    Args:
        values: fp32 [N], not negative unless `signed`. A non-finite block (in a vetoed step) gets meaningless codes,
            but no index is out of range.
        signed: whether there may be negative numbers.
        random: int32 [N] with 16 random lower bits, for unbiased stochastic rounding; None for rounding to nearest.

    Returns:
        uint8 [N], fp32 [ceil(N / 256)].
    """
    table = _table(signed, values.device)
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % CODE_BLOCK)).view(-1, CODE_BLOCK)
    scales = blocks.abs().amax(-1)
    sizes = (blocks.abs() / scales.clamp(min=_TINY)[:, None]).view(-1)[: values.numel()].nan_to_num_(nan=0.0)
    # if rounding of the logarithm shifts the level by one, the share is below 0 or above 1: the code is the same
    top = table.numel() - 1
    below = sizes.log2().mul_(_PER_OCTAVE).floor_().add_(top).clamp_(min=0).int()
    low, high = table[below], table[(below + 1).clamp_(max=top)]
    share = (sizes - low) / (high - low).clamp(min=_TINY)
    threshold = 0.5 if random is None else ((random & 0xFFFF).float() + 0.5) / 65536
    levels = below + (share > threshold)
    if signed:
        return (levels + _SIGN * ((values < 0) & (levels > 0))).to(torch.uint8), scales
    return torch.where(sizes > 0, levels.clamp(min=1), levels).to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Decodes uint8 [N] with scales fp32 [ceil(N / 256)] to fp32 [N], exactly the same on every device."""
    levels = codes.int()
    sizes = _table(signed, codes.device)[levels & (_SIGN - 1) if signed else levels]
    values = sizes * scales.repeat_interleave(CODE_BLOCK)[: codes.numel()]
    return torch.where(levels >= _SIGN, -values, values) if signed else values


def _table(signed: bool, device: torch.device) -> Tensor:
    """Returns the size of every level relative to the scale, 0 to 1: fp32 from fp64, so equal on all devices."""
    levels = _SIGN if signed else 2 * _SIGN
    octaves = torch.arange(2 - levels, 1, dtype=torch.float64, device=device) / _PER_OCTAVE
    return torch.cat([torch.zeros(1, device=device), torch.exp2(octaves).float()])
