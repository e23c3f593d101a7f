"""Law 2: a parameter's initial value is a pure function of (seed, its name, its full shape)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from pipeline.models.construction import counter
from pipeline.models.construction.initial_values import InitByName, Zeros
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta, parameter_shapes
from pipeline.models.construction.recorded_init import Fill, recorded_fills
from pipeline.models.construction.rectangle import Rectangle

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
def test_values_depend_on_the_seed_and_the_name_and_not_on_the_number_of_layers(family: str) -> None:
    two, four = (dict(real(family, num_hidden_layers=n).named_parameters()) for n in (2, 4))
    other = dict(real(family, seed=2).named_parameters())
    for name, value in two.items():
        # gpt2 scales its residual projections by the number of layers: a function of the config, not of the layout
        if not (family == "gpt2" and "c_proj.weight" in name):
            assert torch.equal(value, four[name]), name
        if value.ndim >= 2:
            assert not torch.equal(value, other[name]), name
            same = [each for each in two if each != name and torch.equal(two[each], value)]
            assert same == [], f"{name} has the values of {same}"


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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_value_of_a_box_is_that_part_of_the_full_value(family: str) -> None:
    model = meta(family, **({"pad_token_id": 7} if family == "llama" else {}))
    values = InitByName(model, seed=1)
    for name, shape in parameter_shapes(model).items():
        full = values.value(name)
        for first in range(0, shape[0], -(-shape[0] // 3)):
            count = min(-(-shape[0] // 3), shape[0] - first)
            box = Rectangle.full(shape).rows(first, count)
            assert torch.equal(values.value(name, box=box), full[first : first + count]), name
        half = Rectangle((0,) * (len(shape) - 1) + (shape[-1] // 2,), (*shape[:-1], shape[-1] - shape[-1] // 2))
        assert torch.equal(values.value(name, box=half), full[..., shape[-1] // 2 :]), name


def test_the_row_of_the_padding_token_is_zero_in_every_box() -> None:
    model = meta("llama", pad_token_id=7)
    values, name = InitByName(model, seed=1), "model.embed_tokens.weight"
    assert not values.value(name, box=Rectangle((7, 10), (1, 20))).any()
    assert values.value(name, box=Rectangle((6, 0), (1, 64))).all()
    assert not values.value(name)[7].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_initialization_of_common_families_is_recorded_and_runs_on_nothing(family: str) -> None:
    model = meta(family)
    values = InitByName(model, seed=1)
    assert all(values.fills(name) is not None for name in parameter_shapes(model))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_is_neither_constant_nor_drawn_by_a_counter_is_left_to_the_architectures_code() -> None:
    linear = nn.Linear(8, 8, device="meta")
    unknown: list[Callable[[], object]] = [
        lambda: nn.init.trunc_normal_(linear.weight),  # torch does nothing on meta
        lambda: nn.init.orthogonal_(linear.weight),
        lambda: linear.weight.data.normal_().mul_(2.0),
        linear.weight.data[:, 0].zero_,
        lambda: None,
    ]
    for initialize in unknown:
        assert recorded_fills(linear.weight, lambda known=initialize: (known(), None)[1]) is None
    with torch.no_grad():
        nn.init.normal_(linear.weight, std=0.5)
    last = recorded_fills(linear.weight, lambda: (nn.init.ones_(linear.weight), nn.init.uniform_(linear.weight))[0])
    assert last == (Fill("uniform", 0.0, 1.0),)


def test_zeros_and_the_check_of_a_resumed_run_draw_nothing() -> None:
    model, shapes = meta("llama"), parameter_shapes(meta("llama"))
    with _Draws() as draws:
        InitByName(model, seed=1).check()
        materialize(model, Zeros(shapes), device=torch.device("cpu"))
    assert draws.elements == 0
    fresh = meta("llama")
    with _Draws() as draws, patch.object(counter, "philox", side_effect=counter.philox) as philox:
        materialize(fresh, InitByName(fresh, seed=1), device=torch.device("cpu"))
    assert philox.call_count > 0  # the counter counts
    assert not any(parameter.any() for parameter in model.parameters())


class _Draws(TorchDispatchMode):
    """Counts the elements that torch draws off the meta device."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not args[0].is_meta:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_tied_parameters_stay_one_object() -> None:
    model = real("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in parameter_shapes(model)


def test_parameters_are_materialized_one_at_a_time() -> None:
    model = meta("llama")
    assert all(p.is_meta for p in model.parameters())
    alive: list[int] = []

    def make(_name: str, on_meta: nn.Parameter) -> nn.Parameter:
        alive.append(sum(not p.is_meta for p in model.parameters()))
        return nn.Parameter(torch.zeros_like(on_meta, device="cpu"))

    materialize(model, InitByName(model, seed=1), device=torch.device("cpu"), make=make)
    assert alive == [0] * len(list(model.parameters()))
