"""AdamW with moments in bf16 and in 8 bits: its update, its rounding, and what a skipped step leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.config.sections.optimizers import MOMENTS_BYTES
from pipeline.engines.optim import small_moments
from pipeline.engines.optim.log_codes import decode, encode
from pipeline.engines.optim.small_moments import AdamWSmallMoments, random_bits, round_stochastically
from pipeline.engines.optim.split_master import joined, split

LR = 1e-2
OPTIONS = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
DTYPES = [torch.bfloat16, torch.uint8]
LARGEST = float(torch.finfo(torch.bfloat16).max)
"""An fp32 number above it may round to infinity."""
STEP = torch.tensor(3.0)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Parameter, AdamWSmallMoments]:
    parameter = nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(0)))
    return parameter, AdamWSmallMoments([parameter], moments_dtype=dtype, **OPTIONS)  # type: ignore[arg-type]


def stepped(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_update_is_that_of_adamw_with_fp32_moments(dtype: torch.dtype) -> None:
    # the update has the moments before they are rounded
    (small, optimizer), other = made(40, 30, dtype=dtype), nn.Parameter(made(40, 30)[0].detach().clone())
    expected = torch.optim.AdamW([other], **OPTIONS)  # type: ignore[arg-type]
    stepped(small, optimizer, seed=1)
    stepped(other, expected, seed=1)
    torch.testing.assert_close(small, other, rtol=1e-6, atol=1e-7)
    stepped(small, optimizer, seed=2)
    stepped(other, expected, seed=2)
    # half the distance of two numbers, on either moment: 2^-9 and 2^-4 of their size
    assert 0 < float((small - other).detach().abs().max()) < (0.01 if dtype == torch.bfloat16 else 0.2) * LR
    assert {optimizer.state[small][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {dtype}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_second_moment_follows_gradients_that_rounding_to_the_nearest_would_not_let_it_follow(
    dtype: torch.dtype,
) -> None:
    parameter, optimizer = made(10_000, dtype=dtype)
    for _ in range(200):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    found = optimizer.moment(parameter, "exp_avg_sq")
    expected = 1 - 0.999**200
    assert float(found.mean()) == pytest.approx(expected, rel=0.003)
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(3000):
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    assert float(nearest) < 0.5 < 1 - 0.999**3000  # where it stops, and where it should be


def test_rounding_has_the_value_as_its_mean_and_leaves_numbers_of_bf16() -> None:
    for value in (1.001, -3.0e-20, 7.77e10):
        values = torch.full((200_000,), value)
        rounded = round_stochastically(values, random_bits(values.numel(), first=0, step=torch.tensor(3.0)))
        assert len(rounded.unique()) == 2
        spread = float(rounded.double().std()) / values.numel() ** 0.5
        assert abs(float(rounded.double().mean()) - float(values[0].double())) < 4 * spread
    exact = torch.randn(1000).bfloat16()
    bits = random_bits(1000, first=0, step=torch.tensor(1.0))
    assert torch.equal(round_stochastically(exact.float(), bits), exact)


def test_random_bits_depend_on_the_step_and_the_element_and_both_halves_are_even() -> None:
    step = torch.tensor(5.0)
    bits = random_bits(1 << 16, first=0, step=step)
    assert torch.equal(bits[100:200], random_bits(100, first=100, step=step))
    assert float((bits == random_bits(1 << 16, first=0, step=step + 1)).float().mean()) < 1e-3
    for half in (bits & 0xFFFF, (bits >> 16) & 0xFFFF):
        for position in range(16):
            share = float(((half >> position) & 1).double().mean())
            assert share == pytest.approx(0.5, abs=4 * 0.5 / 2**8)  # 4 standard deviations of 2^16 draws
    halves = torch.stack([bits & 0xFFFF, (bits >> 16) & 0xFFFF]).double()
    assert abs(float(torch.corrcoef(halves)[0, 1])) < 4 / 2**8


@pytest.mark.parametrize(("dtype", "pieces"), [(torch.bfloat16, 7), (torch.uint8, 256)])
def test_the_size_of_the_pieces_of_an_update_does_not_enter(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, pieces: int
) -> None:
    results: list[Tensor] = []
    for size in (1 << 24, pieces):
        monkeypatch.setattr(small_moments, "_ELEMENTS_AT_ONCE", size)
        parameter, optimizer = made(30, 30, dtype=dtype)
        for seed in range(3):
            stepped(parameter, optimizer, seed=seed)
        results.append(torch.cat([parameter.detach().view(-1), optimizer.moment(parameter, "exp_avg").view(-1)]))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_found_inf_skips_a_step_and_grad_scale_divides_as_in_fused_adamw(dtype: torch.dtype) -> None:
    parameter, optimizer = made(50, dtype=dtype)
    stepped(parameter, optimizer, seed=1)
    before = [parameter.detach().clone(), *(each.clone() for each in optimizer.state[parameter].values())]
    optimizer.found_inf = torch.ones(1)
    parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.step()
    for old, new in zip(before, (parameter.detach(), *optimizer.state[parameter].values()), strict=True):
        assert torch.equal(old, new)
    scaled, other = made(50, dtype=dtype)
    stepped(scaled, other, seed=1)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.full((1,), 4.0)
    parameter.grad = 4 * torch.ones_like(parameter)
    optimizer.step()
    scaled.grad = torch.ones_like(scaled)
    other.step()
    assert torch.equal(parameter, scaled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoints_moments_are_taken_back_exactly(dtype: torch.dtype) -> None:
    (parameter, optimizer), (other, resumed) = made(77, 30, dtype=dtype), made(77, 30, dtype=dtype)
    for seed in range(5):
        stepped(parameter, optimizer, seed=seed)
    stepped(other, resumed, seed=9)
    other.data.copy_(parameter.data)
    for name in ("exp_avg", "exp_avg_sq"):
        resumed.set_moment(other, name, optimizer.moment(parameter, name).view(-1))
    resumed.state[other]["step"].fill_(5)
    for key, held in optimizer.state[parameter].items():
        assert torch.equal(held, resumed.state[other][key]), key
    for one, its in ((parameter, optimizer), (other, resumed)):
        stepped(one, its, seed=6)
    assert torch.equal(parameter, other)


def test_8_bit_moments_hold_2_03_bytes_per_parameter() -> None:
    parameter, optimizer = made(512, 100, dtype=torch.uint8)
    stepped(parameter, optimizer, seed=1)
    state = optimizer.state[parameter]
    held = sum(each.nbytes for name, each in state.items() if name != "step")
    assert held / parameter.numel() == 2 * MOMENTS_BYTES["8bit"] == 2.03125


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
