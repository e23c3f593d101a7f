"""Random numbers by a counter: published vectors, the same bits in any box, the statistics of a normal distribution."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.construction.counter import normal, philox, table, uniform
from pipeline.models.construction.rectangle import Rectangle

MASK = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # kat_vectors of Random123 1.14, philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_known_vectors(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) & MASK for word in philox((c0, c1, c2, c3), key[0] | key[1] << 32)) == expected


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Rectangle]:
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - first)) for size, first in zip(shape, offsets, strict=True))
    return shape, Rectangle(offsets, sizes)


@given(boxes(), st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_a_box_has_the_bits_of_the_full_tensor(given_box: tuple[tuple[int, ...], Rectangle], key: int) -> None:
    shape, box = given_box
    assert torch.equal(normal(shape, key=key, box=box), normal(shape, key=key)[box.slices])
    assert torch.equal(uniform(shape, key=key, box=box), uniform(shape, key=key)[box.slices])


def test_a_box_of_a_tensor_that_is_computed_in_pieces_has_its_bits() -> None:
    shape = (70, 5003)  # more elements than are computed at a time; runs begin at all four places in a block
    full = normal(shape, key=3)
    for box in (Rectangle((3, 0), (67, 5003)), Rectangle((1, 1250), (69, 1251)), Rectangle((0, 5002), (70, 1))):
        assert torch.equal(normal(shape, key=3, box=box), full[box.slices])


def test_a_scalar_and_an_empty_box_have_values() -> None:
    assert normal((), key=1).shape == ()
    assert normal((8, 4), key=1, box=Rectangle((8, 0), (0, 4))).shape == (0, 4)


def test_elements_beyond_two_to_the_34_are_computed_alone() -> None:
    shape = (1 << 20, 1 << 16)  # 2^36 elements: the counter has more than 32 bits
    last = Rectangle((shape[0] - 1, 0), (1, 1 << 10))
    wrapped = Rectangle(((1 << 18) - 1, 0), (1, 1 << 10))  # the same lower 32 bits
    assert not torch.equal(normal(shape, key=1, box=last), normal(shape, key=1, box=wrapped))


def test_the_table_is_right_and_the_same_on_every_machine() -> None:
    values, slopes = table()
    worst, nearest_tie = 0.0, 1.0
    for entry in range(31 * 256):
        index = (entry + (127 << 8)) & 0x1FFF
        exact = -NormalDist().inv_cdf(2.0 ** (entry // 256 - 32) * (1 + entry % 256 / 256)) * 2**24
        nearest_tie = min(nearest_tie, abs(exact % 1 - 0.5))
        between = -NormalDist().inv_cdf(2.0 ** (entry // 256 - 32) * (1 + (entry % 256 + 0.5) / 256)) * 2**24
        worst = max(worst, abs(values[index] - slopes[index] / 2 - between) / 2**24)
    assert worst < 2e-6  # standard deviations, halfway between two entries, where linear interpolation is worst
    # a library whose logarithm errs by 1e-15 rounds every entry (about 2^26) to the same integer
    assert nearest_tie > 1e-6
    assert max(slopes) < 2**31 / 2**15  # the product with a fraction of 15 bits stays within int32


N = 1 << 22
ERROR = 5 / N**0.5
"""Five standard errors of a mean of N values with variance 1: 0.0024."""


def test_normal_numbers_have_the_moments_and_quantiles_of_the_distribution() -> None:
    x = normal((N,), key=11).double()
    assert abs(x.mean()) < ERROR
    assert abs(x.var() - 1) < ERROR * math.sqrt(2)
    assert abs((x**3).mean()) < ERROR * math.sqrt(15)
    assert abs((x**4).mean() - 3) < ERROR * math.sqrt(96)
    for z in (-4.0, -2.0, -1.0, 0.0, 0.5, 1.5, 3.0):
        p = NormalDist().cdf(z)
        assert abs(float((x < z).double().mean()) - p) < ERROR * math.sqrt(p * (1 - p)), z
    assert 4.5 < float(x.abs().max()) < 6.23


def test_neighbours_rows_names_and_seeds_are_not_correlated() -> None:
    x = normal((N,), key=11).double()
    for lag in (1, 2, 3, 4, 1024):
        assert abs((x[lag:] * x[:-lag]).mean()) < ERROR, lag
    for key in (12, 11 + (1 << 32), 11 ^ (1 << 63)):
        assert abs((x * normal((N,), key=key).double()).mean()) < ERROR, key


def test_uniform_numbers_fill_their_interval_evenly() -> None:
    x = uniform((N,), key=5, low=-2.0, high=6.0)
    counts = torch.histc(x, bins=64, min=-2.0, max=6.0)
    chi_squared = float(((counts - N / 64) ** 2 / (N / 64)).sum())
    assert chi_squared < 63 + 5 * math.sqrt(2 * 63)  # mean and five standard deviations
    assert -2.0 <= float(x.min()) < -1.999
    assert 5.999 < float(x.max()) <= 6.0


def test_mean_and_standard_deviation_are_applied_in_fp32() -> None:
    unit = normal((1000,), key=2)
    assert torch.equal(normal((1000,), key=2, std=0.02), unit * 0.02)
    assert torch.equal(normal((1000,), key=2, std=0.02, mean=1.0), unit * 0.02 + 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_bits_of_the_cpu() -> None:
    gpu, shape = torch.device("cuda"), (1 << 21, 3)
    for box in (None, Rectangle((5, 1), (1 << 20, 2))):
        on_gpu = normal(shape, key=2, std=0.02, mean=0.5, box=box, device=gpu)
        assert torch.equal(on_gpu.cpu(), normal(shape, key=2, std=0.02, mean=0.5, box=box))
        on_gpu = uniform(shape, key=2, low=-0.3, box=box, device=gpu)
        assert torch.equal(on_gpu.cpu(), uniform(shape, key=2, low=-0.3, box=box))
