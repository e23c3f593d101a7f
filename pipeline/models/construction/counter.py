"""Random numbers computed from a counter: element i of a tensor is a function of (key, i), wherever it is computed.

The generator is Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", SC11), keyed with 64
bits. Block n has the counter (n mod 2^32, n / 2^32, 0, 0) and determines elements 4n to 4n + 3 of a row-major tensor.
The cost of a box is therefore that of its own elements.

Normal numbers come from a table of the inverse cumulative distribution function with linear interpolation, with 256
entries for every factor of two in the probability. Bits and interpolation are integers. Only one conversion to fp32 and
one fp32 operation round, each as IEEE 754 defines: the CPU and any GPU compute the same bits, unlike with a math
library's logarithm or cosine. A number is made of 32 random bits, so it is at most 6.23 standard deviations. The
interpolation error is below 2e-6 standard deviations.

All steps are elementwise torch operations on int64, int32 and fp32, and one look-up.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from statistics import NormalDist

import torch
from torch import Tensor

from pipeline.models.construction.rectangle import Rectangle

_MULTIPLIERS, _WEYL, _LOW = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF
"""Constants of Philox 4x32 (Salmon et al., section 3.3), and the lower 32 bits of an int64."""

_SUB_BITS, _FRACTION_BITS, _SCALE_BITS = 8, 15, 24
"""Bits of an fp32 mantissa (23): for a table's entry, and the position between entries; fixed-point bits of values."""

_INDEX = (1 << (5 + _SUB_BITS)) - 1
"""An exponent modulo 32, then the sub-entry: |x| is in [1, 2^31], whose exponents are 32 consecutive ones."""

_CPU_BLOCKS, _GPU_BLOCKS = 1 << 15, 1 << 21
"""Blocks of 4 elements computed at a time: temporary memory is about 80 bytes per block, and fits a CPU's L2 cache."""

CPU = torch.device("cpu")


def normal(
    shape: tuple[int, ...],
    *,
    key: int,
    mean: float = 0.0,
    std: float = 1.0,
    box: Rectangle | None = None,
    device: torch.device = CPU,
) -> Tensor:
    """Computes normally distributed numbers, fp32.

    Args:
        shape: shape of the full tensor.
        key: key of the random numbers, 64 bits.
        mean: mean of the distribution.
        std: standard deviation of the distribution.
        box: part of the tensor to compute; None for the whole tensor.
        device: device that computes the numbers.

    Returns:
        fp32 with the sizes of the box: the same bits as in the full tensor, on any device.
    """
    scale = torch.tensor(std, dtype=torch.float32).item() * 2.0**-_SCALE_BITS

    def values(words: Tensor) -> Tensor:
        scaled = _standard_normal(words).mul_(scale)
        return scaled.add_(mean) if mean else scaled

    return _computed(values, shape, key, box, device)


def uniform(
    shape: tuple[int, ...],
    *,
    key: int,
    low: float = 0.0,
    high: float = 1.0,
    box: Rectangle | None = None,
    device: torch.device = CPU,
) -> Tensor:
    """Computes uniform fp32 numbers from `low` to `high`, both included, in steps of 2^-24 of their difference.

    All other arguments are as in `normal`.
    """
    span = torch.tensor(high - low, dtype=torch.float32).item() * 2.0**-24

    def values(words: Tensor) -> Tensor:
        fraction = words.bitwise_right_shift(8).bitwise_and_(0xFFFFFF)
        return fraction.to(torch.float32).mul_(span).add_(low)

    return _computed(values, shape, key, box, device)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes Philox 4x32-10.

    Args:
        counter: four int64 tensors that broadcast, of 32 bits each.
        key: key of the random numbers, 64 bits.

    Returns:
        Four int64 tensors. The lower 32 bits are the result; the upper 32 bits are meaningless.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, key >> 32
    for _ in range(10):
        # int64 wraps around: all 64 bits of the product of two unsigned 32-bit numbers are right
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (p1 >> 32).bitwise_xor(c1 ^ k0).bitwise_and_(_LOW)
        c2 = (p0 >> 32).bitwise_xor(c3 ^ k1).bitwise_and_(_LOW)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _standard_normal(words: Tensor) -> Tensor:
    """Computes normal numbers times 2^24, fp32, from the lower 32 bits of int64 words."""
    # an odd signed 32-bit number x stands for the probability |x| / 2^32 of a number further out
    x = words.to(torch.int32).bitwise_or_(1).to(torch.float32)
    bits = x.view(torch.int32)
    index = bits.bitwise_right_shift(_FRACTION_BITS).bitwise_and_(_INDEX)
    value, slope = _table(words.device)
    step = slope.index_select(0, index.view(-1)).view_as(index)
    step.mul_(bits & ((1 << _FRACTION_BITS) - 1)).bitwise_right_shift_(_FRACTION_BITS)
    return value.index_select(0, index.view(-1)).view_as(index).sub_(step).to(torch.float32).copysign_(x)


@functools.cache
def table() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Values of the inverse cumulative distribution function, and their decreases to the next value; unit 2^-24.

    Entry (exponent mod 32, sub-entry s) is at x = 2^e (1 + s / 256), e from 0 to 31, with probability x / 2^32.
    """
    entries = 1 << _SUB_BITS
    at = [
        -NormalDist().inv_cdf(2.0 ** (e - 32) * (1 + s / entries)) * 2.0**_SCALE_BITS
        for e in range(31)
        for s in range(entries)
    ]
    rounded = [*map(round, at), 0]  # |x| = 2^31 is the median
    values, slopes = [0] * (_INDEX + 1), [0] * (_INDEX + 1)
    for number, (value, following) in enumerate(itertools.pairwise(rounded)):
        place = (number + (127 << _SUB_BITS)) & _INDEX
        values[place], slopes[place] = value, value - following
    return tuple(values), tuple(slopes)


@functools.cache
def _table(device: torch.device) -> tuple[Tensor, Tensor]:
    value, slope = (torch.tensor(each, dtype=torch.int32, device=device) for each in table())
    return value, slope


def _computed(
    values: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    key: int,
    box: Rectangle | None,
    device: torch.device,
) -> Tensor:
    box = Rectangle.full(shape) if box is None else box
    result = torch.empty(box.sizes, dtype=torch.float32, device=device)
    if not result.numel():
        return result
    starts, length = _runs(shape, box)
    blocks = _GPU_BLOCKS if device.type != "cpu" else _CPU_BLOCKS * torch.get_num_threads()
    runs = result.view(len(starts), length)
    for rows, columns in _pieces(len(starts), length, 4 * blocks):
        first, length = starts[rows] + columns.start, columns.stop - columns.start
        runs[rows, columns] = _run_values(values, first, length, key, device)
    return result


def _runs(shape: tuple[int, ...], box: Rectangle) -> tuple[Tensor, int]:
    """Divides the box into runs of elements that are adjacent in the full tensor: first flat indices, and length."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = max((dim for dim, size in enumerate(shape) if box.sizes[dim] != size), default=0)
    starts = torch.zeros(1, dtype=torch.int64)
    for dim in range(inner):
        along = (torch.arange(box.sizes[dim]) + box.offsets[dim]) * strides[dim]
        starts = (starts[:, None] + along).view(-1)
    if not shape:
        return starts, 1
    return starts + box.offsets[inner] * strides[inner], box.sizes[inner] * strides[inner]


def _pieces(rows: int, length: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Yields pieces of about `elements` elements of a matrix of runs: several whole runs, or parts of one run."""
    together, width = max(1, elements // length), min(length, elements)
    for row in range(0, rows, together):
        for column in range(0, length, width):
            yield slice(row, min(row + together, rows)), slice(column, min(column + width, length))


def _run_values(
    values: Callable[[Tensor], Tensor], first: Tensor, length: int, key: int, device: torch.device
) -> Tensor:
    """Computes values [runs, length] of the runs that begin at flat indices `first` [runs], on the CPU."""
    skipped = first & 3
    least, most = int(skipped.min()), int(skipped.max())
    first, skipped = first.to(device), skipped.to(device)
    number = (first >> 2)[:, None] + torch.arange((length + most + 3) // 4, device=device)
    none = torch.zeros((1, 1), dtype=torch.int64, device=device)
    words = philox((number & _LOW, number >> 32, none, none), key)
    found = torch.stack([values(word) for word in words], dim=-1).view(len(first), -1)
    if least == most:
        return found[:, most : most + length]
    return found.gather(1, skipped[:, None] + torch.arange(length, device=device))
