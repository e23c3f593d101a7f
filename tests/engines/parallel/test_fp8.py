"""fp8 mixed precision: which layers multiply in fp8, what is refused, and that the products are those of fp8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from foundation.errors import ConfigError
from pipeline.config.rules.curve import curve_fields
from pipeline.config.sections.run import Fp8Section
from pipeline.engines.parallel import experts, fp8
from pipeline.engines.parallel.architecture_trial import check_architecture
from pipeline.engines.parallel.assemble import assemble
from pipeline.engines.parallel.experts import exchanges
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.meta import build_meta
from pipeline.models.grouped_products import grouped_product
from pipeline.models.hf_config import resolve_hf_config
from tests.engines.layout_worker import LENGTH, VOCABULARY, first_states, make_engine, resolved, step_batch

pytest.importorskip("torchao", reason="fp8 needs torchao (extra fp8)")

ON = {"enabled": True, "emulate": True}
BF16 = {"enabled": True}
MIXTURE = {"model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 2}
ROWS = {"one expert without rows": (13, 13, 50, 64), "all rows to one": (0, 0, 64, 64), "no rows": (0, 0, 0, 0)}
"""Behind the rows of each expert."""


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


@pytest.mark.parametrize(
    ("section", "sizes", "count", "text"),
    [
        ({}, {}, 4, ", and the experts of 4 layers (rowwise, their weight gradients in bf16)"),
        ({"experts": False}, {}, 0, "; not model.layers.*.mlp.experts"),
        ({}, {"intermediate_size": 24}, 0, "; not model.layers.*.mlp.experts"),
    ],
)
def test_experts_with_fitting_sizes_are_converted_and_routers_are_not(
    section: dict[str, Any], sizes: dict[str, Any], count: int, text: str
) -> None:
    run = resolved({"fp8": {**ON, **section}, "bf16": BF16, "model": {**MIXTURE, **sizes}}, processes=1)
    model = meta_model(run)
    layers = fp8.fp8_layers(run.config.fp8, model, tp=1)
    assert {name.rpartition(".")[2] for name in layers.converted} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert layers.text == f"16 of 16 linear layers in decoder layers{text}"
    found = exchanges(assemble(run, model, None).decoder.causal)
    assert len(layers.experts) == len(found) == count
    assert {type(each.product).__name__ for each in found} <= {"GroupedScaling"}


def test_experts_that_transformers_does_not_stack_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolved({"fp8": ON, "bf16": BF16, "model": MIXTURE}, processes=1)
    monkeypatch.setattr(fp8, "expert_modules", lambda _model: iter(()))
    layers = fp8.fp8_layers(run.config.fp8, meta_model(run), tp=1)
    assert layers.text == "16 of 16 linear layers in decoder layers; not experts"


def test_experts_that_our_product_computes_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolved({"bf16": BF16, "fp8": ON, "model": MIXTURE}, processes=1)
    monkeypatch.setattr(experts, "grouped_product", lambda *operands: 2 * grouped_product(*operands))
    with pytest.raises(ConfigError, match=r"fp8.experts = True\n.*our product of experts gives other logits"):
        check_architecture(run, meta_model(run).config)


def test_mxfp8_of_experts_is_refused() -> None:
    case = {"bf16": BF16, "model": MIXTURE}
    run = resolved({**case, "fp8": {**ON, "recipe": "mxfp8"}}, processes=1)
    with pytest.raises(ConfigError, match=r"mlp.experts .* a scale per row.*\n  try: set fp8.experts to false"):
        fp8.check_fp8(run.config.fp8, meta_model(run), tp=1)
    run = resolved({**case, "fp8": {**ON, "recipe": "mxfp8", "experts": False}}, processes=1)
    fp8.check_fp8(run.config.fp8, meta_model(run), tp=1)


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
    with pytest.raises(ConfigError, match=r"torchao is not installed\n  try: pip install torchao, or set it to false"):
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


@pytest.mark.parametrize(("capability", "refused"), [((8, 9), True), ((9, 0), False), ((10, 3), True)])
def test_experts_in_fp8_are_refused_where_torch_has_no_kernel_for_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    section, device = Fp8Section(enabled=True), torch.device("cuda")
    fp8.check_fp8_device(section, device)
    if not refused:
        fp8.check_fp8_device(section, device, experts=True)
        return
    with pytest.raises(ConfigError, match=r"fp8.experts = True\n.* need 9.0 \(H100, H200\)\n  try: set it to false"):
        fp8.check_fp8_device(section, device, experts=True)


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
    # e4m3 rounds by up to 2^-4; layouts with the same products differ by less than 5e-3 (tests/engines/test_layouts.py)
    assert 1e-2 < distance < 0.15, distance


def test_experts_in_fp8_change_the_gradient_by_roundings() -> None:
    gradients = []
    for in_fp8 in (False, True):
        run = resolved({"bf16": BF16, "fp8": {**ON, "experts": in_fp8}, "model": MIXTURE}, processes=1)
        engine = make_engine(run)
        engine.train_step(step_batch(run, 1), lr=1e-3)
        gradients.append(torch.cat([value.flatten() for name, value in first_states(engine) if ".experts." in name]))
    distance = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    assert 1e-2 < distance < 0.15, distance


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ends", ROWS.values(), ids=ROWS)
def test_grouped_products_are_those_of_operands_in_fp8_and_weight_gradients_of_bf16(
    transposed: bool, ends: tuple[int, ...]
) -> None:
    from pipeline.engines.parallel.fp8_products import GroupedScaling  # noqa: PLC0415

    generator = torch.Generator().manual_seed(1)
    rows, gradient = (torch.randn(ends[-1], size, generator=generator).bfloat16() for size in (48, 32))
    weight = torch.randn(4, *((48, 32) if transposed else (32, 48)), generator=generator).bfloat16()
    last, found = torch.tensor(ends, dtype=torch.int32), []
    for product in (grouped_product, GroupedScaling(Fp8Section(enabled=True, emulate=True))):
        inputs = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        output = product(*inputs, last, transposed)
        output.backward(gradient)
        found.append((output.detach(), inputs[0].grad, inputs[1].grad))
    matrices = weight if transposed else weight.mT
    owner = torch.searchsorted(last, torch.arange(ends[-1]), right=True)
    for ours, left, right in ((found[1][0], rows, matrices), (found[1][1], gradient, matrices.mT)):
        expected = torch.bmm(nearest_in_fp8(left)[:, None], nearest_in_fp8(right.mT).mT[owner])[:, 0]
        torch.testing.assert_close(ours.float(), expected, rtol=2**-7, atol=1e-4)  # written in bf16
    assert torch.equal(found[1][2], found[0][2])  # type: ignore[arg-type]
    if ends[-1]:
        distance = float((found[1][0] - found[0][0]).norm() / found[0][0].norm())
        assert 1e-2 < distance < 0.06, distance  # of two operands, each rounded by up to 2^-4


def nearest_in_fp8(values: Tensor) -> Tensor:
    """Values rounded to e4m3 (three digits behind the first), each row by the power of two that fits its largest."""
    largest = values.float().abs().amax(-1, keepdim=True)
    scaled = values.float() * 2.0 ** torch.floor(torch.log2(448 / largest))
    step = 2.0 ** (torch.floor(torch.log2(scaled.abs().clamp(min=2**-6))) - 3)
    return torch.round(scaled / step) * step * 2.0 ** -torch.floor(torch.log2(448 / largest))


@pytest.mark.parametrize("transposed", [False, True])
def test_operands_of_grouped_products_have_the_layouts_that_the_kernel_takes(transposed: bool) -> None:
    from pipeline.engines.parallel.fp8_products import GroupedScaling  # noqa: PLC0415

    shape = (4, 48, 32) if transposed else (4, 32, 48)
    rows = torch.empty(24, 48, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    # torch's own checks, in its kernel for fake tensors
    output = GroupedScaling(Fp8Section(enabled=True))(rows, weight, ends, transposed)
    output.sum().backward()
    assert output.shape == (24, 32)
    assert rows.grad.shape == rows.shape
    assert weight.grad.shape == shape


def test_a_gathered_weight_of_experts_is_freed_between_the_passes() -> None:
    from pipeline.engines.parallel.fp8_products import GroupedScaling  # noqa: PLC0415

    weight = nn.Parameter(torch.randn(2, 32, 32, dtype=torch.bfloat16))
    rows = torch.randn(32, 32, dtype=torch.bfloat16)
    ends, values = torch.tensor([16, 32], dtype=torch.int32), weight.detach().clone()
    output = GroupedScaling(Fp8Section(enabled=True, emulate=True))(rows, weight, ends, False)
    storage = torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage())
    weight.data = torch.empty(0, dtype=torch.bfloat16)  # as ZeRO-3 frees a weight
    assert storage.expired()
    weight.data = values
    output.sum().backward()
    assert weight.grad.shape == (2, 32, 32)


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
