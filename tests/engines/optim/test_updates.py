"""The optimizers of headrace train: their updates, what they declare, and what of it shows in configs and state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.section import parse
from pipeline.config.deepspeed.file import translate
from pipeline.config.sections.optimizers import ADAMW, KINDS, OptimizerSection, UpdateScope, kind_of
from pipeline.engines.optim import lion
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.state import ensure_all_states
from pipeline.own_loop.elementwise import TOLERANCE, largest_difference

SECTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}},
    "lion": {"type": "Lion", "params": {"betas": [0.9, 0.99]}},
    "sgd": {"type": "SGD"},
    "sgd with momentum": {"type": "SGD", "params": {"momentum": 0.9}},
    "sgd with nesterov momentum": {"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}},
}
LR, DECAY, STEPS = 0.01, 0.1, 5


def section_of(name: str) -> OptimizerSection:
    return parse(OptimizerSection, SECTIONS[name])


def values() -> tuple[list[nn.Parameter], list[list[Tensor]]]:
    """A matrix and a vector, and their gradients of every step."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 5), (7,))
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return weights, [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]


def run(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], gradients: list[list[Tensor]]) -> list[Tensor]:
    for of_step in gradients:
        for weight, gradient in zip(weights, of_step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def lion_of_the_paper(weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """Algorithm 2 of arXiv:2302.06675 in fp64."""
    weight, momentum = weight.detach().double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        direction = torch.sign(0.9 * momentum + 0.1 * gradient)
        weight = weight - LR * (direction + DECAY * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
    return weight


@pytest.mark.parametrize("elements_at_once", [1 << 24, 4])
def test_lion_is_the_algorithm_of_the_paper_however_its_tensors_are_split(
    elements_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lion, "_ELEMENTS_AT_ONCE", elements_at_once)
    weights, gradients = values()
    expected = [lion_of_the_paper(w, [step[i] for step in gradients]) for i, w in enumerate(weights)]
    groups = [{"params": weights, "weight_decay": DECAY}]
    for found, wanted in zip(
        run(build_optimizer(groups, section_of("lion"), lr=LR), weights, gradients), expected, strict=True
    ):
        assert torch.allclose(found.double(), wanted, rtol=0, atol=1e-6)  # steps of fp32 at weights of size 3


@pytest.mark.parametrize("name", ["sgd", "sgd with momentum", "sgd with nesterov momentum"])
def test_sgd_is_torchs_also_from_a_momentum_of_zeros(name: str) -> None:
    params, section = SECTIONS[name].get("params", {}), section_of(name)
    weights, gradients = values()
    expected = run(torch.optim.SGD(weights, lr=LR, weight_decay=DECAY, **params), weights, gradients)
    weights, gradients = values()
    optimizer = build_optimizer([{"params": weights, "weight_decay": DECAY}], section, lr=LR)
    ensure_all_states(optimizer, section.kind)
    for found, wanted in zip(run(optimizer, weights, gradients), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SECTIONS)
def test_an_optimizer_has_the_states_that_its_kind_declares(name: str) -> None:
    weights, gradients = values()
    section = section_of(name)
    optimizer = build_optimizer([{"params": weights, "weight_decay": DECAY}], section, lr=LR)
    run(optimizer, weights, gradients)
    for weight in weights:
        state = {key: value for key, value in optimizer.state[weight].items() if value is not None}
        assert {key for key in state if key != "step"} == set(section.kind.states)
        assert ("step" in state) == section.kind.counts_steps
        assert all(state[key].shape == weight.shape for key in section.kind.states)


@pytest.mark.parametrize("name", SECTIONS)
def test_an_optimizer_that_declares_to_be_element_wise_is(name: str) -> None:
    weights, _ = values()
    section = section_of(name)
    optimizer = build_optimizer([{"params": weights, "weight_decay": DECAY}], section, lr=LR)
    found = largest_difference(optimizer, optimizer.param_groups[0])
    assert found is not None
    assert (found <= TOLERANCE) == (section.kind.scope is UpdateScope.ELEMENT)


def test_the_number_of_states_is_a_property_of_the_optimizer() -> None:
    kinds = [section_of(name).kind for name in ("adamw", "lion", "sgd with momentum", "sgd")]
    assert [len(kind.states) for kind in kinds] == [2, 1, 1, 0]
    assert [kind.bytes_per_parameter for kind in kinds] == [12, 8, 8, 4]
    assert kinds[:3] == [
        kind for kind in KINDS if kind.scope is UpdateScope.ELEMENT
    ]  # without momentum, SGD is another kind
    assert kind_of({"type": "Adam", "params": {}}) == kind_of({}) == ADAMW


def test_defaults_are_those_of_the_type_and_a_dumped_section_is_read_again() -> None:
    for name in SECTIONS:
        section = section_of(name)
        given = {key for key, value in section.params if value is not None}
        assert given == section.kind.parameters - {"moments_dtype"}  # absent is fp32
        assert parse(OptimizerSection, section.model_dump(mode="json")) == section
    assert OptimizerSection().params.betas == (0.9, 0.999)


@pytest.mark.parametrize(("written", "name"), [("sgd", "SGD"), ("lion", "Lion"), ("LION", "Lion"), ("adamw", "AdamW")])
def test_upper_and_lower_case_of_a_type_are_not_distinguished(written: str, name: str) -> None:
    assert translate({"optimizer": {"type": written}}).raw["optimizer"]["type"] == name


def test_auto_is_filled_in_for_the_parameters_that_the_type_has() -> None:
    autos = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    filled = translate({"optimizer": {"type": "Lion", "params": autos}}).raw["optimizer"]
    assert filled["params"] == {"lr": 5e-5, "betas": [0.9, 0.999], "weight_decay": 0.0}
    filled = translate({"optimizer": {"type": "sgd", "params": autos}}).raw["optimizer"]
    assert filled["params"] == {"lr": 5e-5, "weight_decay": 0.0}
