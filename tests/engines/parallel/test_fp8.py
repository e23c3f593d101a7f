"""fp8 mixed precision: which layers multiply in fp8, what is refused, and that the products are those of fp8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.base.errors import ConfigError
from pipeline.config.rules.curve import curve_fields
from pipeline.config.sections.run import Fp8Section
from pipeline.engines.parallel import fp8
from pipeline.engines.parallel.assemble import assemble
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.build.meta import build_meta
from pipeline.models.hf_config import resolve_hf_config
from tests.engines.layout_worker import LENGTH, VOCABULARY, first_states, make_engine, resolved, step_batch

pytest.importorskip("torchao", reason="fp8 needs torchao (extra fp8)")

ON = {"enabled": True, "emulate": True}
BF16 = {"enabled": True}


def meta_model(run: Any) -> nn.Module:
    hf = resolve_hf_config(run.config.model, tokenizer={"vocab_size": VOCABULARY}, sequence_length=LENGTH)
    return build_meta(hf, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)


def test_only_linear_layers_of_decoder_layers_with_fitting_sizes_are_converted() -> None:
    run = resolved(
        {"fp8": ON, "bf16": BF16, "model": {"num_attention_heads": 4, "num_key_value_heads": 1}}, processes=1
    )
    model = meta_model(run)  # keys and values have 8 features
    layers = fp8.fp8_layers(run.config.fp8, model, tp=1)
    assert layers.text == (
        "20 of 28 linear layers in decoder layers; not model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj"
    )
    before = dict(model.named_parameters())
    causal = assemble(run, model, None).decoder.causal
    converted = {name for name, module in causal.named_modules() if type(module).__name__ == "Fp8Linear"}
    assert converted == set(layers.converted)
    assert dict(causal.named_parameters()).keys() == before.keys()


def test_routers_are_not_converted() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 2}
    run = resolved({"fp8": ON, "bf16": BF16, "model": experts}, processes=1)
    layers = fp8.fp8_layers(run.config.fp8, meta_model(run), tp=1)
    assert {name.rpartition(".")[2] for name in layers.converted} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert layers.text.endswith("experts, whose grouped products stay in bf16")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({}, 'fp8.enabled = True\n.*bf16 is off\n  try: add "bf16": {"enabled": true}'),
        (
            {"bf16": BF16, "train_micro_batch_size_per_gpu": 1, "data": {"sequence_length": 24}},
            "24 tokens .* of 16\n.* 16",
        ),
        ({"bf16": BF16, "fp8": {**ON, "fsdp_all_gather": True}}, "stage 0 does not gather weights by FSDP2"),
        ({"bf16": BF16, "fp8": {**ON, "fsdp_all_gather": True, "recipe": "rowwise"}}, "use fp8.recipe tensorwise"),
    ],
)
def test_what_fp8_does_not_combine_with_is_refused(case: dict[str, Any], message: str) -> None:
    data = {"sources": [{"path": "none"}], "sequence_length": LENGTH, **case.get("data", {})}
    with pytest.raises(ConfigError, match=message):
        resolved({"fp8": ON, **case, "data": data}, processes=1)


def test_fp8_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolved({"fp8": ON, "bf16": BF16}, processes=1)
    monkeypatch.setattr(fp8, "find_spec", lambda _name: None)
    with pytest.raises(
        ConfigError, match=r"torchao is not installed\n  try: pip install torchao \(or headrace\[fp8\]\)"
    ):
        fp8.check_fp8(run.config.fp8, meta_model(run), tp=1)


def test_a_model_without_fitting_layers_is_refused() -> None:
    odd = {"hidden_size": 40, "intermediate_size": 72}
    run = resolved({"fp8": ON, "bf16": BF16, "model": odd}, processes=1)
    with pytest.raises(ConfigError, match=r"no linear layer in the decoder layers of this llama has sizes .* of 16"):
        fp8.check_fp8(run.config.fp8, meta_model(run), tp=1)


@pytest.mark.parametrize(
    ("recipe", "capability", "message"),
    [
        ("tensorwise", None, "no GPU.*\n  try: use bf16 alone .* fp8.emulate true"),
        ("rowwise", (8, 0), "compute capability 8.0, and this needs 8.9\n  try: use bf16 alone"),
        ("mxfp8", (9, 0), "compute capability 9.0, and this needs 10.0\n  try: use tensorwise or rowwise"),
        ("mxfp8", (10, 0), None),
        ("tensorwise", (8, 9), None),
    ],
)
def test_a_device_without_fp8_is_refused(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, capability: tuple[int, int] | None, message: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    device = torch.device("cpu" if capability is None else "cuda")
    section = Fp8Section(enabled=True, recipe=recipe)
    fp8.check_fp8_device(section.model_copy(update={"emulate": True}), device)
    if message is None:
        fp8.check_fp8_device(section, device)
        return
    with pytest.raises(ConfigError, match=message):
        fp8.check_fp8_device(section, device)


def test_a_resume_with_another_recipe_is_another_curve() -> None:
    fields = [
        curve_fields(resolved({"bf16": BF16, "fp8": section}, processes=1))["fp8"]
        for section in ({"enabled": False}, ON, {**ON, "recipe": "mxfp8"}, {**ON, "emulate": False})
    ]
    assert fields == [None, "tensorwise", "mxfp8", "tensorwise"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_the_gradient_is_that_of_fp8_and_close_to_that_of_bf16(recipe: str) -> None:
    gradients = []
    for section in ({}, {**ON, "recipe": recipe}):
        run = resolved({"bf16": BF16, "fp8": section, "model": {"intermediate_size": 64}}, processes=1)
        engine = make_engine(run)
        engine.train_step(step_batch(run, 1), lr=1e-3)
        gradients.append(torch.cat([value.flatten() for _name, value in first_states(engine)]))
    distance = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    # e4m3 rounds by up to 2^-4; layouts with the same products differ by less than 5e-3 (tests/engines/test_fp8.py)
    assert 1e-2 < distance < 0.15, distance


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_gathered_weight_is_freed_between_the_passes(recipe: Any) -> None:
    from pipeline.engines.parallel.fp8_products import scaling_of  # noqa: PLC0415

    weight = nn.Parameter(torch.randn(32, 32, dtype=torch.bfloat16))
    features, values = torch.randn(32, 32, dtype=torch.bfloat16), weight.detach().clone()
    output = scaling_of(Fp8Section(enabled=True, emulate=True, recipe=recipe))(features, weight)
    storage = torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage())
    weight.data = torch.empty(0, dtype=torch.bfloat16)  # as ZeRO-3 frees a weight
    assert storage.expired()
    weight.data = values
    output.sum().backward()
    assert weight.grad.shape == (32, 32)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group of two ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_weights_are_gathered_in_fp8_and_biases_and_norms_in_bf16() -> None:
    section = {**ON, "fsdp_all_gather": True}
    case = {"fp8": section, "bf16": BF16, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    run = resolved(case, processes=2)
    engine, seen = make_engine(run), dict[str, str]()
    layer = engine._roots[0].causal.model.layers[0]

    def look(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        seen["q_proj"] = type(layer.self_attn.q_proj.weight).__name__
        seen["norm"] = str(layer.input_layernorm.weight.dtype)

    layer.register_forward_hook(look, prepend=True)
    engine.train_step(step_batch(run, 1), lr=1e-3)
    assert seen == {"q_proj": "Float8TrainingTensor", "norm": "torch.bfloat16"}
    local = layer.self_attn.q_proj.weight._local_tensor
    assert local._precomputed_scale == pytest.approx(448 / local._tensor.abs().max())
