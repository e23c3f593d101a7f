"""A bf16 weight and its residual are the fp32 master weight, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.optim.split_master import joined, split

LARGEST = float(torch.finfo(torch.bfloat16).max)
"""An fp32 number above it may round to infinity."""


@given(st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=50))
def test_the_master_weight_comes_back_bit_for_bit(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    weight, residual = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16)
    split(master, weight, residual)
    assert torch.equal(joined(weight, residual).view(torch.int32), master.view(torch.int32))
    distance = (weight.double() - master.double()).abs()
    assert (distance <= (master.bfloat16().double() - master.double()).abs()).all()  # no other bf16 number is nearer


def test_a_master_between_two_bf16_numbers_is_rounded_away_from_zero() -> None:
    master = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    weight, residual = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int16)
    split(master, weight, residual)
    assert weight.tolist() == [1 + 2**-7, 1 + 2**-6, -1 - 2**-7]
    assert torch.equal(joined(weight, residual), master)
