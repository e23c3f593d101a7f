"""AdamW with moments in bf16 and in 8 bits: its update, its rounding, and what a skipped step leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline.config.sections.optimizers import MOMENTS_BYTES
from pipeline.engines.optim import small_moments
from pipeline.engines.optim.small_moments import AdamWSmallMoments, random_bits, round_stochastically

LR = 1e-2
OPTIONS = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


DTYPES = [torch.bfloat16, torch.uint8]


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
