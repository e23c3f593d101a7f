"""Rotation changes no function, spreads outliers over all channels, and is refused where it could not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.compress.quantization.calibration import decoder_layers
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.families import FAMILIES
from pipeline.compress.quantization.rotation import Rotation, orthogonal
from pipeline.compress.quantization.rules import prepare
from pipeline.models.folder.loading import load_model
from tests.compress.quantization.outliers import FACTOR, make_outliers
from tests.compress.quantization.test_quantize import packed_here, write_config
from tests.compress.quantization.test_smoothing import TINY, heldout_loss
from tests.compress.quantization.test_streaming import plan_of, streamed, tensors_of
from tests.evaluation.heldout.small import make_model


@pytest.fixture(scope="module")
def untied(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("rotated") / "model", tokens, tied=False)


@pytest.mark.parametrize("size", [1, 8, 24, 48, 192])
def test_the_matrix_is_orthogonal_and_spreads_one_channel_over_all(size: int) -> None:
    matrix = orthogonal(size, seed=0)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-5)
    assert torch.equal(matrix, orthogonal(size, seed=0))
    odd = size // (size & -size)
    assert float(matrix.abs().max()) <= (odd / size) ** 0.5 + 1e-6  # 8**-0.5 for every element where size is 8


@pytest.mark.parametrize("kind", sorted(kind for kind, family in FAMILIES.items() if not family.norms_outputs))
def test_the_function_stays_the_same(kind: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, tie_word_embeddings=False)).eval()
    rows = torch.randint(64, (4, 24))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        before = model(input_ids=rows).logits
        hidden = model.base_model(input_ids=rows).last_hidden_state
        rotation = Rotation.of(model, FAMILIES[kind])
        rotation.outside(model)
        for layer in decoder_layers(model):
            rotation.layer(layer)
        after = model(input_ids=rows).logits
        turned = model.base_model(input_ids=rows).last_hidden_state
    assert torch.allclose(before, after, atol=2e-5 * float(before.abs().max()))
    assert not torch.allclose(hidden, turned, atol=0.1)


def test_streamed_layers_are_turned_as_the_whole_model_is(untied: Path, tokens: Path, tmp_path: Path) -> None:
    fields = {"scheme": "W8A8", "method": "gptq", "smoothing": 0.5, "rotation": True, "calibration": {"samples": 16}}
    staging = streamed(plan_of(tmp_path, untied, tokens, **fields))
    packed_here(tmp_path, untied, tokens, **fields)
    found, expected = tensors_of(staging), tensors_of(tmp_path / "small")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)) for name, value in expected.items())


def test_an_outlier_channel_of_the_residual_stream_is_spread_over_all(untied: Path) -> None:
    """A large constant in one channel, as trained models have them: largest over median channel, in front of q_proj."""
    model: Any = AutoModelForCausalLM.from_pretrained(untied).eval()
    seen: list[torch.Tensor] = []
    query = model.model.layers[1].self_attn.q_proj
    query.register_forward_pre_hook(lambda _module, given: seen.append(given[0].abs().flatten(0, 1).amax(0)))
    rows = torch.arange(384).reshape(12, 32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] += 20
        before = model(input_ids=rows).logits
        rotation = Rotation.of(model, FAMILIES["llama"])
        rotation.outside(model)
        for layer in decoder_layers(model):
            rotation.layer(layer)
        after = model(input_ids=rows).logits
    assert torch.allclose(before, after, atol=1e-4 * float(before.abs().max()))
    ratios = [float(each.max() / each.median()) for each in seen]
    assert ratios[0] > 20
    assert ratios[1] < 2


def test_outliers_of_norms_and_weights_are_gone_without_calibration(untied: Path, tokens: Path, tmp_path: Path) -> None:
    source = make_outliers(untied, tmp_path / "outliers", activations=False)
    original = heldout_loss(untied, tokens)
    loses = {}
    for rotation in (False, True):
        folder = tmp_path / str(rotation)
        folder.mkdir()
        packed_here(folder, source, tokens, scheme="W4A16", rotation=rotation)
        loses[rotation] = heldout_loss(folder / "small", tokens) - original
    assert loses[False] > 0.2
    assert abs(loses[True]) < 0.1 * loses[False]
    norm = load_model(tmp_path / "True/small").model.layers[0].input_layernorm.weight.detach()
    assert float(norm.max() / norm.min()) == 1.0  # of a model in which that was FACTOR and more
    before = load_model(source).model.layers[0].input_layernorm.weight.detach()
    assert float(before.max() / before.min()) > FACTOR / 2


def test_what_commutes_with_no_rotation_is_refused(model: Path, untied: Path, tokens: Path, tmp_path: Path) -> None:
    def refused(source: Path, **fields: Any) -> str:
        raw = json.loads(write_config(tmp_path, source, tokens, rotation=True, **fields).read_text())
        with pytest.raises(ConfigError) as caught:
            prepare(parse(QuantizeConfig, raw))
        return str(caught.value)

    assert "is its embedding" in refused(model, scheme="W4A16")
    assert "a type of GGUF files" in refused(untied, scheme="Q8_0")
    for kind, expected in (("gemma2", "norms after its layers"), ("gpt2", "not for gpt2")):
        other = make_outliers(untied, tmp_path / kind, activations=True)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        assert expected in refused(other, scheme="W4A16")
