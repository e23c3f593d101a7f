"""Muon: its update by the formulas, its two parts, vetoed steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.section import parse
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import UpdateScale, parameter_groups, set_learning_rate
from pipeline.engines.optim.newton_schulz import newton_schulz
from pipeline.models.hidden_matrices import MatrixForm

LR, DECAY = 0.02, 0.1
FORMS = {
    "wide": MatrixForm((6, 10), (6,)),
    "qkv": MatrixForm((16, 8), (8, 4, 4)),
    "by head": MatrixForm((12, 8), (2, 2, 2), groups=2),
    "transposed": MatrixForm((5, 9), (9,), transposed=True),
    "experts": MatrixForm((6, 8, 5), (4, 4)),
    "inputs first": MatrixForm((12, 7), (4, 4, 4), inputs_first=True),
    "transposed experts": MatrixForm((3, 5, 8), (1, 1), transposed=True, groups=4),
}


def section(**params: Any) -> OptimizerSection:
    return parse(OptimizerSection, {"type": "Muon", "params": {"weight_decay": DECAY, **params}})


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(form.shape, generator=generator) for name, form in FORMS.items()}


def muon(weights: dict[str, nn.Parameter], optimizer: OptimizerSection) -> Any:
    scales = {name: UpdateScale(matrix=name in FORMS) for name in weights}
    built: Any = build_optimizer(parameter_groups(weights, scales, optimizer.params), optimizer)
    built.bind_whole(weights, FORMS)
    return built


def step(optimizer: Any, weights: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        weights[name].grad = gradient.clone()
    set_learning_rate(optimizer, LR)
    optimizer.step()


def iterated(matrix: Tensor) -> Tensor:
    """The published iteration in fp64, by the singular values, which it maps one by one."""
    u, sizes, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    sizes = sizes / sizes.square().sum().sqrt()
    for _ in range(5):
        sizes = 3.4445 * sizes - 4.7750 * sizes**3 + 2.0315 * sizes**5
    return u @ torch.diag(sizes) @ v


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_newton_schulz_maps_singular_values_by_the_published_polynomial(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = newton_schulz(matrix, steps=5)
    assert torch.allclose(found.double(), iterated(matrix), atol=1e-4)
    assert torch.allclose(newton_schulz(matrix * 1e-4, steps=5), found, atol=1e-5)  # whatever its scale
    assert not newton_schulz(torch.zeros(shape), steps=5).any()


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_an_update_is_that_of_the_formulas_for_each_logical_matrix(rule: str, nesterov: bool) -> None:
    weights = {name: nn.Parameter(value) for name, value in values(0).items()}
    optimizer = muon(weights, section(adjust_lr=rule, nesterov=nesterov, momentum=0.9))
    expected = {name: weight.detach().double() for name, weight in weights.items()}
    momenta = {name: torch.zeros_like(value) for name, value in expected.items()}
    for seed in (1, 2):
        step(optimizer, weights, values(seed))
        for name, gradient in values(seed).items():
            momenta[name] = 0.9 * momenta[name] + 0.1 * gradient.double()
            direction = 0.9 * momenta[name] + 0.1 * gradient.double() if nesterov else momenta[name]
            expected[name] = (1 - LR * DECAY) * expected[name] - LR * orthogonal(name, direction, rule)
    for name, weight in weights.items():
        assert torch.allclose(weight.double(), expected[name], atol=1e-5), name


def orthogonal(name: str, direction: Tensor, rule: str) -> Tensor:
    """By rows that are named one by one."""
    rows: dict[str, list[Any]] = {
        "wide": [range(6)],
        "qkv": [range(8), range(8, 12), range(12, 16)],
        "by head": [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]],
        "transposed": [range(9)],
        "inputs first": [range(4), range(4, 8), range(8, 12)],
        "experts": [range(4), range(4, 8)],
        "transposed experts": [range(0, 8, 2), range(1, 8, 2)],
    }
    found = torch.empty_like(direction)
    for expert in range(FORMS[name].stacked):
        stored, into = (t if t.ndim == 2 else t[expert] for t in (direction, found))
        if FORMS[name].transposed:
            stored, into = stored.T, into.T
        for each in rows[name]:
            matrix = stored[list(each)].T if FORMS[name].inputs_first else stored[list(each)]
            m, n = matrix.shape
            factor = 0.2 * math.sqrt(max(m, n)) if rule == "match_rms_adamw" else math.sqrt(max(1, m / n))
            update = factor * iterated(matrix)
            into[list(each)] = update.T if FORMS[name].inputs_first else update
    return found


def test_parameters_that_are_no_matrices_get_adamws_update_at_their_own_rate() -> None:
    start = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    weights = {"embedding": nn.Parameter(start.clone()), "wide": nn.Parameter(values(0)["wide"])}
    optimizer = muon(weights, section(lr=1e-3, adam_lr=5e-4, muon_lr=2e-3))
    gradients = {"embedding": torch.randn(4, 4), "wide": values(1)["wide"]}
    step(optimizer, weights, gradients)
    plain = nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([plain], lr=LR / 2, betas=(0.9, 0.95), eps=1e-10, weight_decay=DECAY)
    plain.grad = gradients["embedding"]
    adamw.step()
    assert torch.equal(weights["embedding"], plain)
    kept = (1 - 2 * LR * DECAY) * values(0)["wide"]
    assert float((weights["wide"].detach() - kept).square().mean().sqrt()) == pytest.approx(2 * LR * 0.2, rel=0.4)
    assert {frozenset(state) for state in optimizer.state.values()} == {
        frozenset({"momentum_buffer", "step"}),
        frozenset({"exp_avg", "exp_avg_sq", "step"}),
    }


def test_a_vetoed_step_changes_neither_weights_nor_momenta_and_others_divide_gradients() -> None:
    weights = {name: nn.Parameter(value) for name, value in values(0).items()}
    optimizer = muon(weights, section())
    step(optimizer, weights, values(1))
    before = [t.clone() for p in weights.values() for t in (p.detach(), *optimizer.state[p].values())]
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())
    step(optimizer, weights, {name: torch.full(form.shape, math.inf) for name, form in FORMS.items()})
    after = [t for p in weights.values() for t in (p.detach(), *optimizer.state[p].values())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.full((), 4.0)
    step(optimizer, weights, {name: 4 * value for name, value in values(2).items()})
    plain = {name: nn.Parameter(value) for name, value in values(0).items()}
    other = muon(plain, section())
    for seed in (1, 2):
        step(other, plain, values(seed))
    for name, weight in weights.items():
        assert torch.allclose(weight, plain[name], atol=1e-6)


def test_a_matrix_without_a_gradient_has_one_of_zeros_and_a_frozen_one_stays() -> None:
    weights = {name: nn.Parameter(value, requires_grad=name != "qkv") for name, value in values(0).items()}
    optimizer = muon(weights, section())
    gradients = {name: value for name, value in values(1).items() if name not in ("wide", "qkv")}
    step(optimizer, weights, gradients)
    assert torch.equal(weights["wide"], values(0)["wide"] * (1 - LR * DECAY))
    assert torch.equal(weights["qkv"], values(0)["qkv"])
