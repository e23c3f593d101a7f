"""The optimizers of headrace train: their updates, parameter groups, and what shows in configs and state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from foundation.section import parse
from pipeline.config.deepspeed.file import translate
from pipeline.config.sections.optimizers import ADAMW, KINDS, OptimizerSection, UpdateScope, kind_of
from pipeline.engines.common import update_scales
from pipeline.engines.optim import lion
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import (
    DECAYED,
    NOT_DECAYED,
    UpdateScale,
    parameter_groups,
    set_learning_rate,
    without_empty_groups,
)
from pipeline.engines.optim.state import ensure_all_states
from pipeline.models.construction.meta import build_meta
from pipeline.own_loop.elementwise import TOLERANCE, largest_difference
from tests.sweeps.families import tiny_fields

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


def section(kind: str = "AdamW", **params: Any) -> OptimizerSection:
    return parse(OptimizerSection, {"type": kind, "params": {"lr": LR, "weight_decay": 0.1, **params}})


def test_without_scales_the_groups_are_those_of_weight_decay() -> None:
    named = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2, 2))}
    groups = parameter_groups(named, {"a": NOT_DECAYED, "b": DECAYED}, section().params)
    assert groups == [{"params": [named["b"]], "weight_decay": 0.1}, {"params": [named["a"]], "weight_decay": 0.0}]


def test_an_empty_group_takes_a_parameter_with_its_options() -> None:
    groups = [{"params": [], "lr_scale": 0.5}, {"params": ["a", "b"], "lr_scale": 2.0}, {"params": ["c"]}]
    found = without_empty_groups(groups)
    assert found == [
        {"params": ["b"], "lr_scale": 2.0},
        {"params": ["a"], "lr_scale": 2.0},
        {"params": ["c"]},
    ]


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_a_scaled_group_is_updated_as_with_scaled_hyperparameters(moments: str) -> None:
    scale = UpdateScale(weight_decay=4.0, lr=0.25, eps=1e4)
    scaled = _updated(section(moments_dtype=moments), scale, lr=LR)
    alone = _updated(section(moments_dtype=moments, weight_decay=0.4, eps=1e-4), DECAYED, lr=LR / 4)
    assert torch.equal(scaled, alone)


def test_lion_takes_the_learning_rate_and_weight_decay() -> None:
    scaled = _updated(section("Lion"), UpdateScale(weight_decay=4.0, lr=0.25), lr=LR)
    assert torch.equal(scaled, _updated(section("Lion", weight_decay=0.4), DECAYED, lr=LR / 4))


def _updated(optimizer: OptimizerSection, scale: UpdateScale, *, lr: float) -> torch.Tensor:
    """A weight after three steps; stochastic rounding is seeded."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.linspace(-1, 1, 512).view(2, 256))
    groups = parameter_groups({"w": weight}, {"w": scale}, optimizer.params)
    built = build_optimizer(groups, optimizer)
    for step in range(3):
        weight.grad = torch.full_like(weight, 1e-4 * (step + 1))
        set_learning_rate(built, lr)
        built.step()
    return weight.detach().clone()


NOT_DECAYED_OF_FAMILIES = {
    "mamba": {"A_log"},
    "jamba": {"A_log"},
    "zamba": {"A_log", "D", "dt_proj_bias"},
    "gpt_oss": {"gate_up_proj_bias", "down_proj_bias"},
    "recurrent_gemma": {"input_gate_bias", "recurrent_gate_bias"},
    "deepseek_v4": {"position_bias"},
    "rwkv": {"time_mix_key", "time_mix_value", "time_mix_receptance"},
    "qwen2_moe": set(),  # nor does the gate of the shared expert [1, D] count as a vector
}


@pytest.mark.parametrize("kind", NOT_DECAYED_OF_FAMILIES)
def test_biases_vectors_and_state_space_rates_are_not_decayed_whatever_their_shape(kind: str) -> None:
    fields = {key: value for key, value in tiny_fields(kind).items() if key != "model_type"}
    model = build_meta(AutoConfig.for_model(kind, **fields), dtype=torch.float32, attn_implementation="eager")
    scales, parameters = update_scales(model), dict(model.named_parameters())
    left = {
        name.rpartition(".")[2] for name, each in parameters.items() if each.ndim > 1 and not scales[name].weight_decay
    }
    assert left == NOT_DECAYED_OF_FAMILIES[kind]
    assert not any(scale.weight_decay for name, scale in scales.items() if parameters[name].ndim < 2)


def test_a_mark_of_the_models_own_code_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight._no_weight_decay = True  # type: ignore[assignment]
    assert [name for name, scale in update_scales(model).items() if scale.weight_decay] == ["0.weight"]
