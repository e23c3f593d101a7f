"""GPTQ and SignRound make the error of outputs smaller than rounding to the nearest, on the numbers a scheme stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from foundation.errors import ConfigError, DataError
from foundation.section import parse
from pipeline.compress.quantization.calibration import Method, calibrate, decoder_layers, layer_inputs
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.gptq import e4m3, gptq, integers
from pipeline.compress.quantization.rules import prepare
from pipeline.compress.quantization.signround import SignRound
from pipeline.data.dataset import TokenDataset
from pipeline.models.folder.model_folder import ModelFolder
from tests import warm
from tests.compress.quantization.test_quantize import ENTRY, packed_here, write_config
from tests.evaluation.heldout.small import SEQUENCE
from tests.support import output_of
from tests.sweeps.families import tiny_fields

O, I, N, GROUP = 48, 192, 1024, 32  # noqa: E741  outputs, inputs, tokens: the letters of the formulas


@pytest.mark.parametrize(
    ("kind", "what"),
    [("gemma4_text", "other inputs than hidden states by position"), ("deepseek_v4", "input_ids, which differ")],
)
def test_layers_that_take_more_than_hidden_states_are_refused_before_the_work(kind: str, what: str) -> None:
    """What every layer reads of the text itself would be that of the first batch, or nothing."""
    fields = {**tiny_fields(kind), "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    batches = [torch.arange(16).view(1, 16) + start for start in (0, 100)]
    with pytest.raises(DataError, match=f'(?s){what}.*"method": "rtn"'):
        layer_inputs(model, decoder_layers(model), batches)


def layer(*, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight [O, I] and correlated inputs [N, I], as layers have them: few directions have most of the variance."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(I // 8, I, generator=generator)
    inputs = torch.randn(N, I // 8, generator=generator) @ directions + 0.3 * torch.randn(N, I, generator=generator)
    return torch.randn(O, I, generator=generator), inputs


def scales(weight: Tensor, group: int, bits: int) -> Tensor:
    return weight.reshape(O, -1, group).abs().amax(-1) / ((2**bits - 1) / 2)


def output_error(weight: Tensor, rounded: Tensor, inputs: Tensor) -> float:
    return float((inputs @ (weight - rounded).T).square().mean())


@pytest.mark.parametrize(("bits", "group"), [(4, GROUP), (4, I), (8, I), (2, GROUP)])
def test_the_error_of_the_output_is_a_fraction_of_that_of_rounding(bits: int, group: int) -> None:
    weight, inputs = layer()
    scale, rounding = scales(weight, group, bits), integers(bits)
    nearest = rounding(weight, scale.repeat_interleave(group, 1))
    found = gptq(weight, inputs.T @ inputs / N, scale, rounding=rounding)
    assert output_error(weight, found, inputs) < 0.4 * output_error(weight, nearest, inputs)
    # every element is an integer times the scale of its own group
    steps = found / scale.repeat_interleave(group, 1)
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    assert -(2 ** (bits - 1)) <= steps.round().min() <= steps.round().max() <= 2 ** (bits - 1) - 1


def test_without_correlation_it_is_rounding_to_the_nearest() -> None:
    weight, _ = layer()
    scale, rounding = scales(weight, GROUP, 4), integers(4)
    found = gptq(weight, torch.eye(I), scale, rounding=rounding)
    assert torch.equal(found, rounding(weight, scale.repeat_interleave(GROUP, 1)))


def test_it_is_the_solution_of_the_paper_for_one_input_after_the_other() -> None:
    """The last of two inputs takes the least-squares correction: w2 + (w1 - q1) H12 / H22, then rounded."""
    hessian = torch.tensor([[4.0, 1.0], [1.0, 2.0]])
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(2)  # as it is damped, so that it is exact here
    weight, scale = torch.tensor([[0.37, 0.61]]), torch.tensor([[0.1]])
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(2)
    first = (weight[0, 0] / 0.1).round() * 0.1
    corrected = weight[0, 1] + (weight[0, 0] - first) * damped[0, 1] / damped[1, 1]
    expected = torch.stack([first, (corrected / 0.1).round() * 0.1])
    found = gptq(weight, hessian, scale, rounding=integers(8))
    assert found[0] == pytest.approx(expected.numpy(), abs=1e-6)


def test_inputs_that_are_always_zero_do_no_harm_and_e4m3_is_stored_exactly() -> None:
    weight, inputs = layer()
    inputs[:, 5] = 0
    scale = weight.abs().amax(-1, keepdim=True) / 448
    found = gptq(weight, inputs.T @ inputs / N, scale, rounding=e4m3)
    assert torch.isfinite(found).all()
    assert torch.equal(e4m3(found, scale.expand_as(found)), found)
    assert output_error(weight, found, inputs) < output_error(weight, e4m3(weight, scale.expand_as(weight)), inputs)


def test_inputs_that_are_always_zero_leave_the_correction_of_the_others_as_it_is() -> None:
    """Damping is a share of the mean of H's diagonal, in which they must not count, however small the others are."""
    weight, inputs = layer()
    inputs *= 1e-3
    inputs[:, :6] = 0
    scale, rounding = scales(weight, GROUP, 4), integers(4)
    nearest = rounding(weight, scale.repeat_interleave(GROUP, 1))
    found = gptq(weight, inputs.T @ inputs / N, scale, rounding=rounding)
    assert output_error(weight, found, inputs) < 0.4 * output_error(weight, nearest, inputs)
    assert torch.equal(gptq(weight, torch.zeros(I, I), scale, rounding=rounding), nearest)


def test_every_layer_sees_what_the_quantized_layers_before_it_give(model: Path, tokens: Path) -> None:
    """In 3 bits, on other windows than those of the calibration, the predictions stay nearer to the original's."""
    dataset = TokenDataset.open(tokens, split="train", sequence_length=SEQUENCE)
    batches = torch.from_numpy(dataset.read(range(64))[:, :-1]).long().split(8)
    rows = torch.from_numpy(dataset.read(range(64, 80))[:, :-1]).long()

    def scale(module: nn.Linear) -> Tensor:
        return module.weight.abs().amax(-1, keepdim=True) / 3.5

    plain, calibrated, nearest = (AutoModelForCausalLM.from_pretrained(model).eval() for _ in range(3))
    linear = {name: each for name, each in nearest.named_modules() if isinstance(each, nn.Linear) and name != "lm_head"}
    cpu = torch.device("cpu")
    found = calibrate(calibrated, linear, batches, method=Method(scale, integers(3)), device=cpu)
    assert set(found) == set(linear)
    with torch.no_grad():
        for module in linear.values():
            module.weight.copy_(integers(3)(module.weight, scale(module).expand_as(module.weight)))
        expected, *others = (each(input_ids=rows).logits.log_softmax(-1) for each in (plain, calibrated, nearest))
    kl = [float((expected.exp() * (expected - other)).sum(-1).mean()) for other in others]
    assert kl[0] < 0.6 * kl[1]


@pytest.mark.integration
def test_a_folder_made_with_gptq_is_nearer_to_the_original(model: Path, tokens: Path, tmp_path: Path) -> None:
    kl: dict[str, Any] = {}
    for method in ("rtn", "gptq"):
        (tmp_path / method).mkdir()
        fields = {"scheme": "W4A16", "method": method, "consumers": ["transformers"]}
        output_of(warm.run(ENTRY, "--config", write_config(tmp_path / method, model, tokens, **fields)))
        details = json.loads((tmp_path / method / "small/manifest.json").read_text())["details"]
        assert details["quantization"]["method"] == method
        kl[method] = details["consumers"]["transformers"]["mean_kl"]
    assert kl["gptq"] < 0.8 * kl["rtn"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"calibration": {"samples": 1_000_000}}, "calibration.samples = 1000000"),
        ({"calibration": {"samples": 2}}, "use 3 or more"),  # 96 inputs, windows of 32 tokens
        ({"calibration": {"iterations": 10}}, "calibration.iterations = 10\n  why: method gptq learns nothing"),
        ({"scheme": "Q8_0"}, "a type of GGUF files"),
    ],
)
def test_calibration_that_cannot_work_is_refused(
    fields: dict[str, Any], expected: str, model: Path, tokens: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, model, tokens, **{"scheme": "W4A16", "method": "gptq", **fields})
    with pytest.raises(ConfigError) as caught:
        prepare(parse(QuantizeConfig, json.loads(config.read_text())))
    assert expected in str(caught.value)


def test_layers_that_read_the_same_inputs_are_rounded_together_as_each_alone() -> None:
    """Rows do not depend on one another: stacking changes no more than the order of sums in a matrix product."""
    (first, inputs), (second, _) = layer(), layer(seed=1)
    hessian, weight = inputs.T @ inputs / N, torch.cat([first, second])
    alone = [gptq(each, hessian, scales(each, GROUP, 4), rounding=integers(4)) for each in (first, second)]
    together = gptq(
        weight, hessian, torch.cat([scales(each, GROUP, 4) for each in (first, second)]), rounding=integers(4)
    )
    # a weight in the middle of two numbers may go to the other one, and takes those behind it along
    assert float((together == torch.cat(alone)).float().mean()) > 0.99


BITS = 3


def scale_of(module: nn.Linear) -> Tensor:
    return module.weight.detach().abs().amax(-1, keepdim=True) / ((2**BITS - 1) / 2)


def test_predictions_stay_nearer_to_the_original_than_by_rounding(model: Path, tokens: Path) -> None:
    dataset = TokenDataset.open(tokens, split="train", sequence_length=SEQUENCE)
    batches = torch.from_numpy(dataset.read(range(32))[:, :-1]).long().split(8)
    rows = torch.from_numpy(dataset.read(range(64, 80))[:, :-1]).long()
    plain, learnt, nearest = (AutoModelForCausalLM.from_pretrained(model).eval() for _ in range(3))
    linear = {name: each for name, each in nearest.named_modules() if isinstance(each, nn.Linear) and name != "lm_head"}
    method = Method(scale_of, sign_round=SignRound(lambda _module: BITS, iterations=60))
    found = calibrate(learnt, linear, batches, method=method, device=torch.device("cpu"))
    assert set(found) == set(linear)
    for name, scale in found.items():
        steps = learnt.get_submodule(name).weight / scale
        assert torch.allclose(steps, steps.round(), atol=1e-3)  # integers times the scale that is stored
        assert -(2 ** (BITS - 1)) <= steps.round().min() <= steps.round().max() <= 2 ** (BITS - 1) - 1
        assert (scale <= scale_of(plain.get_submodule(name))).all()  # clips are at most 1
    with torch.no_grad():
        for module in linear.values():
            module.weight.copy_(integers(BITS)(module.weight, scale_of(module).expand_as(module.weight)))
        expected, *others = (each(input_ids=rows).logits.log_softmax(-1) for each in (plain, learnt, nearest))
    kl = [float((expected.exp() * (expected - other)).sum(-1).mean()) for other in others]
    assert kl[0] < 0.7 * kl[1]


def test_where_nothing_is_better_weights_are_rounded_to_the_nearest() -> None:
    """Weights that the scheme stores exactly stay as they are, whatever a step would do to them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 4, bias=False)

        def forward(self, hidden_states: Tensor) -> Tensor:
            found: Tensor = self.proj(hidden_states)
            return found

    layer = Layer()
    with torch.no_grad():
        layer.proj.weight.copy_(torch.randint(-4, 4, (4, 8)).float())
    before, scale = layer.proj.weight.clone(), torch.ones(4, 1)
    method = SignRound(lambda _module: BITS, iterations=5)
    hidden = [torch.randn(2, 3, 8)]
    with torch.no_grad():
        found = method.fit(
            layer, {"proj": layer.proj}, hidden, {}, scale=lambda _module: scale, device=torch.device("cpu")
        )
    assert torch.equal(layer.proj.weight, before)
    assert torch.equal(found["proj"], scale)


def test_fp8_has_no_integers_to_choose_from(model: Path, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model, tokens, scheme="FP8", method="auto-round")
    with pytest.raises(ConfigError, match="FP8 stores e4m3"):
        prepare(parse(QuantizeConfig, json.loads(config.read_text())))


def test_a_head_in_fp8_is_no_obstacle_as_it_is_rounded_to_nearest(model: Path, tokens: Path, tmp_path: Path) -> None:
    fields = {
        "method": "auto-round",
        "head": "FP8",
        "untie": True,
        "dtype": "float32",
        "calibration": {"iterations": 2},
    }
    packed_here(tmp_path, model, tokens, scheme="W4A16", consumers=["transformers"], **fields)
    tensors = ModelFolder.open(tmp_path / "small").tensors
    assert tensors["lm_head.weight"].dtype == "F8_E4M3"
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors
