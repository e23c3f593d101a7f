"""Parameter groups: the learning rate, epsilon and weight decay of each parameter in every optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headrace.base.section import parse
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.engines.optim.build import build_optimizer
from pipeline.engines.optim.groups import (
    DECAYED,
    NOT_DECAYED,
    UpdateScale,
    parameter_groups,
    set_learning_rate,
    without_empty_groups,
)

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
