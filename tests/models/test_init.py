"""Law 2: a parameter's initial value is a pure function of (seed, its name, its full shape)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from pipeline.models.materialize import materialize
from pipeline.models.meta import build_meta, parameter_shapes
from pipeline.models.values import InitByName

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "intermediate_size": 128},
    "qwen3": {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
    "mistral": {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2},
    "gemma": {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300},
    "qwen3_moe": {
        **SMALL,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
}


def meta(family: str, **changes: Any) -> nn.Module:
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    return build_meta(config, dtype=torch.float32, attn_implementation="sdpa")


def real(family: str, *, seed: int = 1, **changes: Any) -> nn.Module:
    model = meta(family, **changes)
    materialize(model, InitByName(model, seed=seed), device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_parameter_initialized_alone_has_the_same_value_as_in_the_full_model(family: str) -> None:
    full = dict(real(family).named_parameters())
    fresh = meta(family)
    for name in list(parameter_shapes(fresh))[::-1]:
        torch.random.manual_seed(hash(name) % 1000)  # the state of the process's generator has no influence
        assert torch.equal(InitByName(fresh, seed=1).value(name), full[name]), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_values_depend_on_the_seed_and_not_on_the_number_of_layers(family: str) -> None:
    two, four = (dict(real(family, num_hidden_layers=n).named_parameters()) for n in (2, 4))
    other = dict(real(family, seed=2).named_parameters())
    for name, value in two.items():
        # gpt2 scales its residual projections by the number of layers: a function of the config, not of the layout
        if not (family == "gpt2" and "c_proj.weight" in name):
            assert torch.equal(value, four[name]), name
        if value.ndim >= 2:
            assert not torch.equal(value, other[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_initialization_is_the_architectures_own(family: str) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    theirs = dict(AutoModelForCausalLM.from_config(meta(family).config).named_parameters())
    for name, ours in real(family).named_parameters():
        spread = theirs[name].std().item()
        # the standard error of a standard deviation of n values is 1 / sqrt(2 n); five of them, on both sides
        slack = 10 / (2 * ours.numel()) ** 0.5
        assert ours.std().item() == pytest.approx(spread, rel=slack, abs=1e-9), name
        assert ours.mean().item() == pytest.approx(theirs[name].mean().item(), abs=max(1e-9, spread * slack)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_materialized_model_computes_the_same_logits_as_one_built_without_meta(family: str) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    ours = real(family).eval()
    theirs = AutoModelForCausalLM.from_config(ours.config, attn_implementation="sdpa").eval()
    theirs.load_state_dict(ours.state_dict())
    ids = torch.arange(20)[None] % 300
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_tied_parameters_stay_one_object() -> None:
    model = real("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in parameter_shapes(model)


def test_parameters_are_materialized_one_at_a_time() -> None:
    model = meta("llama")
    assert all(p.is_meta for p in model.parameters())
    alive: list[int] = []

    def record(parameter: nn.Parameter) -> None:
        alive.append(sum(not p.is_meta for p in model.parameters()))
        parameter.data = torch.empty(0)  # as ZeRO-3 does: the full value is freed before the next is computed

    materialize(model, InitByName(model, seed=1), device=torch.device("cpu"), on_parameter=record)
    assert alive == [0] * len(list(model.parameters()))
