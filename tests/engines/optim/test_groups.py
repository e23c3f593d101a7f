"""Parameter groups: the learning rate, epsilon and weight decay of each parameter in every optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from foundation.section import parse
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.engines.common import update_scales
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import (
    DECAYED,
    NOT_DECAYED,
    UpdateScale,
    parameter_groups,
    set_learning_rate,
    without_empty_groups,
)
from pipeline.models.construction.meta import build_meta
from tests.sweeps.families import tiny_fields

LR = 0.01


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
