"""Logarithmic 8-bit codes: their range and error, unbiased rounding, and that decoded numbers are encoded alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.engines.optim.log_codes import decode, encode
from pipeline.engines.optim.small_moments import random_bits

STEP = torch.tensor(3.0)


def numbers(count: int, *, signed: bool) -> Tensor:
    """Numbers whose sizes spread over some 12 octaves."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(12 * torch.rand(count, generator=generator) - 20)
    return sizes * torch.randn(count, generator=generator).sign() if signed else sizes


@pytest.mark.parametrize("signed", [False, True])
def test_numbers_are_within_half_a_level_when_rounded_to_the_nearest(signed: bool) -> None:
    values = numbers(10_000, signed=signed)
    codes, scales = encode(values, signed=signed, random=None)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (10_000,), (40,))
    error = (decode(codes, scales, signed=signed) - values).abs() / values.abs()
    assert 0.03 < float(error.max()) <= 1.0001 * (2 ** (1 / 8) - 1) / 2


@pytest.mark.parametrize("signed", [False, True])
def test_decoded_numbers_are_encoded_to_the_same_codes_and_scales(signed: bool) -> None:
    codes, scales = encode(
        numbers(10_000, signed=signed), signed=signed, random=random_bits(10_000, first=0, step=STEP)
    )
    again = encode(decode(codes, scales, signed=signed), signed=signed, random=None)
    assert torch.equal(again[1], scales)
    assert torch.equal(decode(*again, signed=signed), decode(codes, scales, signed=signed))


@pytest.mark.parametrize("value", [0.7, -0.0123, 3e-6])
def test_rounding_has_the_value_as_its_mean(value: float) -> None:
    values = torch.full((256 * 1000,), value)
    values[::256] = 1.0  # the scale of every block
    found = decode(*encode(values, signed=True, random=random_bits(values.numel(), first=0, step=STEP)), signed=True)
    rounded = found[torch.arange(values.numel()) % 256 != 0].double()
    assert len(rounded.unique()) == 2
    assert abs(float(rounded.mean()) - value) < 4 * float(rounded.std()) / rounded.numel() ** 0.5


def test_only_zero_is_zero_without_a_sign_and_a_block_of_zeros_is_zero() -> None:
    values = torch.zeros(600)
    values[:3] = torch.tensor([1.0, 1e-30, 2.0**-31])
    found = decode(*encode(values, signed=False, random=random_bits(600, first=0, step=STEP)), signed=False)
    assert found[0] == 1
    assert 0 < found[1] < 2**-31
    assert float(found[2]) == pytest.approx(2.0**-31, rel=0.1)
    assert not found[3:].any()


def test_a_block_does_not_see_the_others() -> None:
    values = numbers(1024, signed=True)
    values[256:512] *= 1e6
    codes, scales = encode(values, signed=True, random=None)
    alone = encode(values[:256], signed=True, random=None)
    assert torch.equal(codes[:256], alone[0])
    assert torch.equal(scales[:1], alone[1])


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_spoil_their_block_only(wrong: float) -> None:
    values = numbers(1024, signed=False)
    values[300] = wrong
    random = random_bits(1024, first=0, step=STEP)
    codes, scales = encode(values, signed=False, random=random)
    alone = encode(values[512:], signed=False, random=random[512:])
    assert torch.equal(codes[512:], alone[0])
    assert torch.equal(scales[2:], alone[1])
    assert not scales[1].isfinite()
