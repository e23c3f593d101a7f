"""Law 2: a parameter's initial value is a pure function of (seed, its name, its full shape)."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from pipeline.models.construction import counter
from pipeline.models.construction.buffers import computed_buffers
from pipeline.models.construction.initial_values import InitByName, Zeros
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta, parameter_shapes
from pipeline.models.construction.recorded_init import Fill, recorded_fills
from pipeline.models.construction.rectangle import Rectangle
from tests.sweeps.families import families, tiny_fields

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
def test_a_materialized_model_computes_the_same_logits_as_one_built_without_meta(family: str) -> None:
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


def samples(config: PretrainedConfig, *, ours: bool) -> dict[str, torch.Tensor]:
    """Initial values by kind (names without layer numbers) over four models, of transformers or by `InitByName`."""
    found: dict[str, list[torch.Tensor]] = {}
    model: Any = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    for seed in range(4):
        if ours:
            initial = InitByName(model, seed=seed)
            state = {name: initial.value(name) for name, _ in model.named_parameters()}
            state |= computed_buffers(model, initial)
        else:
            torch.manual_seed(100 + seed)
            state = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).state_dict()
        tied = model.all_tied_weights_keys
        for name, value in {tied.get(name, name): value for name, value in state.items()}.items():
            found.setdefault(re.sub(r"\d+", "*", name), []).append(value.detach().double().flatten())
    return {kind: torch.cat(values) for kind, values in found.items()}


def wrong_kinds(config: PretrainedConfig, *, theirs: PretrainedConfig | None = None) -> set[str]:
    """Kinds of parameters and buffers of another distribution: Kolmogorov-Smirnov, of the same one p < 2e-5."""
    expected, found = samples(theirs or config, ours=False), samples(config, ours=True)
    assert expected.keys() == found.keys()
    wrong = set()
    for kind, values in expected.items():
        pair, both = (values, found[kind]), torch.cat([values, found[kind]])
        one, other = (torch.searchsorted(each.sort()[0], both, right=True) / len(each) for each in pair)
        if not float((one - other).abs().max()) <= 2.4 * (2 / len(values)) ** 0.5:
            wrong.add(kind)
    return wrong


def family_config(kind: str) -> PretrainedConfig:
    known = inspect.signature(CONFIG_MAPPING[kind].__init__).parameters
    outside = "pad_token_id" in known and (known["pad_token_id"].default or 0) >= 512
    return AutoConfig.for_model(**tiny_fields(kind), **({"pad_token_id": 0} if outside else {}))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma", "qwen3_moe", "mamba2", "rwkv", "qwen3_5_text"])
def test_every_kind_of_parameter_is_distributed_as_transformers_draws_it(kind: str) -> None:
    assert wrong_kinds(family_config(kind)) == set()


def test_another_distribution_is_found() -> None:
    config, wider = family_config("llama"), family_config("llama")
    wider.initializer_range = 1.1 * config.initializer_range
    assert len(wrong_kinds(config, theirs=wider)) == 9  # embedding, head, and the seven matrices of a layer


@pytest.mark.sweep
def test_of_all_families_every_kind_of_parameter_is_distributed_as_transformers_draws_it() -> None:
    wrong, compared = {}, 0
    for kind in families():
        try:
            config = family_config(kind)
            model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
        except Exception:  # no causal language model without other packages, or another model's assistant
            continue
        if sum(each.numel() for each in model.parameters()) > 3_000_000:  # multimodal: without a tiny config
            continue
        compared += 1
        if found := wrong_kinds(config):
            wrong[kind] = found
    assert wrong == {}
    assert compared >= 150
