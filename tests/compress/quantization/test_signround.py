"""SignRound: learnt rounding makes the error of a decoder layer's output smaller, on numbers that are stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.compress.quantization.calibration import Method, calibrate
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.gptq import integers
from pipeline.compress.quantization.rules import prepare
from pipeline.compress.quantization.signround import SignRound
from pipeline.data.dataset import TokenDataset
from pipeline.models.folder.model_folder import ModelFolder
from tests.compress.quantization.test_quantize import packed_here, write_config
from tests.evaluation.heldout.small import SEQUENCE

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
