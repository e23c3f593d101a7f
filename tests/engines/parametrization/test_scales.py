"""CompleteP's factors: the published multipliers folded into parameters are the same training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.sections.optimizers import OptimizerParams, OptimizerSection
from pipeline.engines.optim.groups import UpdateScale, parameter_groups, set_learning_rate
from pipeline.engines.parametrization.kinds import ParameterKind
from pipeline.engines.parametrization.scaled_init import ScaledInit
from pipeline.engines.parametrization.scales import Parametrization, Scale, find_parametrization, rule
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.rectangle import Rectangle, part
from tests.engines.parametrization.models import BASES, CONFIGS, completep, meta_of, section_of

LR, EPS, DECAY = 5e-3, 1e-3, 0.1
"""Epsilon is as large as gradients are, so that a wrong one is another curve."""


def test_the_factors_are_those_of_the_published_table() -> None:
    # m_N = 4, m_L = 3, an MLP six times as wide; Dey et al. 2025, table 1, with alpha = 1
    def of(kind: ParameterKind, *, fan_in: float = 1.0, tied: bool = False) -> Scale:
        return rule(kind, fan_in=fan_in, width=4.0, depth=3.0, tied=tied)

    assert of(ParameterKind.EMBEDDING) == Scale(eps=1 / 4)
    assert of(ParameterKind.HIDDEN, fan_in=4.0) == Scale(init=1 / 2, lr=1 / 4, eps=1 / 12, weight_decay=4.0)
    assert of(ParameterKind.BLOCK_VECTOR) == Scale(eps=1 / 12)
    assert of(ParameterKind.FINAL_NORM) == Scale(eps=1 / 4)
    # with the multiplier 1 / m_L of the branch, then 1 / m_N of the logits
    folded = of(ParameterKind.BRANCH_OUTPUT, fan_in=6.0)
    assert folded.lr == pytest.approx(1 / 18)
    assert folded.init == pytest.approx(6**-0.5 / 3)
    assert (folded.eps, folded.weight_decay) == pytest.approx((1 / 4, 18.0))
    assert of(ParameterKind.HEAD) == Scale(init=1 / 4, lr=1 / 4, eps=1.0, weight_decay=4.0)
    assert of(ParameterKind.FINAL_NORM, tied=True) == of(ParameterKind.HEAD)


@pytest.mark.parametrize(("adjust_lr", "rate"), [("match_rms_adamw", 1 / 2), ("original", 1.0)])
def test_muons_updates_have_the_spectral_norm_that_a_layer_needs(adjust_lr: str, rate: float) -> None:
    """sqrt(outputs / inputs), up to a factor that no width changes: here four times the base model's."""
    muon = parse(OptimizerSection, {"type": "Muon", "params": {"adjust_lr": adjust_lr}})
    base = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    section = section_of("llama", base={**base, "num_hidden_layers": 2}, **sizes)
    found = find_parametrization(section, meta_of(section), muon)
    assert found is not None
    of = {name.removeprefix("model.layers.0."): scale for name, scale in found.scales.items()}
    for name in ("self_attn.q_proj.weight", "self_attn.v_proj.weight", "mlp.up_proj.weight"):
        assert (of[name].lr, of[name].weight_decay) == pytest.approx((rate, 1 / rate)), name
    # the multiplier 1 / m_L of the branch, at twice the depth
    last = of["mlp.down_proj.weight"]
    assert (last.lr, last.weight_decay) == pytest.approx((rate / 2, 2 / rate))
    assert of["self_attn.q_proj.weight"].init == pytest.approx(1 / 2)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False), ("mistral", False), ("gpt2", True)],
)
def test_folded_multipliers_train_as_the_published_multipliers_do(family: str, tied: bool) -> None:
    model, found = completep(family, tie_word_embeddings=tied)
    ours = _curve(model, found, found.scales, multiply=False)
    published = {name: _unfolded(found, name, tied=tied) for name in found.scales}
    model, _ = completep(family, tie_word_embeddings=tied)
    theirs = _curve(model, found, published, multiply=True)
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert abs(ours[-1] - ours[0]) > 0.1, "the model has to learn, for a curve to tell anything"
    model, _ = completep(family, tie_word_embeddings=tied)
    wrong = {n: replace(s, eps=found.scales[n].eps) for n, s in published.items()}
    other = _curve(model, found, wrong, multiply=True)
    assert other[-1] != pytest.approx(ours[-1], rel=1e-4), "epsilon has to matter here"


def _multiplier(found: Parametrization, name: str, *, tied: bool) -> float:
    kind = found.kinds[name]
    if kind in (ParameterKind.BRANCH_OUTPUT, ParameterKind.BRANCH_BIAS):
        return 1 / found.depth
    return 1 / found.width if kind is ParameterKind.HEAD or (kind is ParameterKind.FINAL_NORM and tied) else 1.0


def _unfolded(found: Parametrization, name: str, *, tied: bool) -> Scale:
    return found.scales[name].multiplied(1 / _multiplier(found, name, tied=tied))


def _curve(meta: nn.Module, found: Parametrization, scales: Mapping[str, Scale], *, multiply: bool) -> list[float]:
    """20 losses in fp64; with `multiply` the forward pass has the published multipliers."""
    model, values = meta, ScaledInit(meta, replace(found, scales=scales), seed=1)
    materialize(model, values, device=torch.device("cpu"))
    model.double()
    if multiply:
        _multiply_outputs(model, found)
    named = dict(model.named_parameters())
    updates = {
        name: UpdateScale(weight_decay=s.weight_decay if named[name].ndim > 1 else 0.0, lr=s.lr, eps=s.eps)
        for name, s in scales.items()
    }
    params = parse(OptimizerParams, {"lr": LR, "eps": EPS, "weight_decay": DECAY})
    optimizer = torch.optim.AdamW(parameter_groups(named, updates, params), eps=EPS, betas=(0.9, 0.95))
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(loss.item())
        loss.backward()
        set_learning_rate(optimizer, LR)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _multiply_outputs(model: nn.Module, found: Parametrization) -> None:
    def times(factor: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        return lambda _module, _inputs, output: output * factor

    for name, kind in found.kinds.items():
        if kind is ParameterKind.BRANCH_OUTPUT:
            model.get_submodule(name.rpartition(".")[0]).register_forward_hook(times(1 / found.depth))
    head: Any = model
    head.get_output_embeddings().register_forward_hook(times(1 / found.width))


@pytest.mark.parametrize("family", CONFIGS)
def test_at_the_base_models_sizes_nothing_changes(family: str) -> None:
    model, found = completep(family, base={"hidden_size": 32})
    assert set(found.scales.values()) == {Scale()}
    plain, scaled = InitByName(model, seed=3), ScaledInit(model, found, seed=3)
    for name, _ in model.named_parameters():
        assert torch.equal(plain.value(name), scaled.value(name)), name


@pytest.mark.parametrize("family", CONFIGS)
def test_a_part_of_a_scaled_parameter_is_that_of_the_whole(family: str) -> None:
    model, found = completep(family)
    values = ScaledInit(model, found, seed=3)
    for name, parameter in model.named_parameters():
        whole = Rectangle.full(tuple(parameter.shape))
        box = whole.rows(parameter.shape[0] // 4, parameter.shape[0] // 2)
        assert torch.equal(values.value(name, box=box), part(values.value(name), box)), name


def test_gpt2s_residual_projections_are_those_of_the_base_models_depth() -> None:
    model, found = completep("gpt2", initializer_range=0.1)
    value = ScaledInit(model, found, seed=1).value("transformer.h.3.mlp.c_proj.weight")
    # the base model's own 0.1 / sqrt(2 x 2 layers), a fan-in 96 / 64 as large, and 1 / m_L = 1 / 2
    assert float(value.std()) == pytest.approx(0.1 / 2 / (96 / 64) ** 0.5 / 2, rel=0.03)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "heads of another size": ("llama", {}, {"hidden_size": 16}, "model.base.num_attention_heads"),
    "other sharing of keys": (
        "llama",
        {},
        {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
        "model.base.num_key_value_heads",
    ),
    "key/value heads of GPT-2": ("gpt2", {}, {"num_key_value_heads": 2}, "model.base.num_key_value_heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_base_model_that_does_not_fit_is_refused(name: str) -> None:
    family, changes, base, field = REFUSED[name]
    section = section_of(family, base=base, **changes)
    with pytest.raises(ConfigError) as caught:
        find_parametrization(section, meta_of(section))
    assert caught.value.field == field


@pytest.mark.parametrize("family", ["gemma", "olmo2", "mixtral"])
def test_an_architecture_without_rules_is_refused(family: str) -> None:
    changes = {"num_local_experts": 2} if family == "mixtral" else {"head_dim": 8} if family == "gemma" else {}
    section = section_of("llama", attention_bias=False, mlp_bias=False)
    config = {k: v for k, v in section.config.items() if k != "mlp_bias"} | {"model_type": family, **changes}
    section = section.model_copy(update={"config": config})
    with pytest.raises(ConfigError, match=f"{family} has no CompleteP rules"):
        find_parametrization(section, meta_of(section))


def test_bases_are_there_for_all_families() -> None:
    assert BASES.keys() == CONFIGS.keys()
