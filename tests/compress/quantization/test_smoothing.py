"""Smoothing and rotation change no function, spread outliers over channels, and are refused where they cannot be."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.compress.quantization.calibration import Method, calibrate, decoder_layers
from pipeline.compress.quantization.families import FAMILIES, Family
from pipeline.compress.quantization.rotation import Rotation, orthogonal
from pipeline.compress.quantization.smoothing import Smoother
from pipeline.data.dataset import TokenDataset
from pipeline.models.folder.loading import load_model
from tests import warm
from tests.compress.quantization.test_quantize import ENTRY, packed_here, write_config
from tests.compress.quantization.test_refusals import refusal
from tests.compress.quantization.test_streaming import plan_of, streamed, tensors_of
from tests.evaluation.heldout.small import SEQUENCE
from tests.models.architectures import COMMON
from tests.support import output_of

CHANNELS, FACTOR = 6, 30.0
"""Of every norm in a decoder layer."""
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def make_outliers(source: Path, folder: Path, *, activations: bool) -> Path:
    """Copies a Llama; 6 channels per norm are 30 times as large in the activations, or in the weights that read them.

    With `activations` norm weights times 30 and the columns that read them divided by 30 (int8 activations suffer), or
    else norm weights divided and columns times 30 (groups of weights with one scale suffer).
    """
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    factor = FACTOR if activations else 1 / FACTOR
    generator = torch.Generator().manual_seed(0)
    for name in sorted(tensors):
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in _READERS:
            continue
        channels = torch.randperm(tensors[name].numel(), generator=generator)[:CHANNELS]
        tensors[name][channels] *= factor
        for reader in _READERS[norm]:
            tensors[f"{layer}.{reader}.weight"][:, channels] /= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TINY: dict[str, Any] = {**COMMON, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64, **EXPERTS}
SMOOTHED = ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "self_attn.v_proj")


def unscaled(module: nn.Module) -> torch.Tensor:
    raise AssertionError(f"nothing is rounded, and the scales of {module} are asked for")


def smoothed(model: nn.Module, batches: list[torch.Tensor], *, family: Family, alpha: float = 0.5) -> None:
    method = Method(unscaled, smoother=Smoother(alpha, family, maximum=True))
    assert calibrate(model, [], batches, method=method, device=torch.device("cpu")) == {}


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_the_function_stays_the_same_and_the_weights_do_not(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms are all alike in a new model, biases are 0
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            assert parameter.abs().max() > 0, name
    rows = torch.randint(64, (8, 24))
    with torch.no_grad():
        before = model(input_ids=rows).logits
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        smoothed(model, list(rows.split(2)), family=FAMILIES[kind])
        after = model(input_ids=rows).logits
    assert torch.allclose(before, after, atol=2e-5 * float(before.abs().max()))
    changed = {name for name, value in model.state_dict().items() if not torch.allclose(value, weights[name])}
    norm = FAMILIES[kind].mlp_norm
    for part in (*SMOOTHED, norm, "mlp"):
        assert any(f"layers.1.{part}" in name for name in changed), part
    assert not any("embed_tokens" in name or "lm_head" in name for name in changed)


def test_afterwards_no_channel_of_a_norm_stands_out(model: Path, tokens: Path, tmp_path: Path) -> None:
    """At alpha 1 the maxima of all channels are equal; they differed by a factor of 30 and more."""
    loaded = AutoModelForCausalLM.from_pretrained(make_outliers(model, tmp_path / "outliers", activations=True)).eval()
    rows = torch.from_numpy(TokenDataset.open(tokens, split="train", sequence_length=SEQUENCE).read(range(16))[:, :-1])
    largest: dict[str, torch.Tensor] = {}

    def note(_module: nn.Module, _given: Any, made: torch.Tensor) -> None:
        largest["channels"] = made.detach().abs().flatten(0, 1).amax(0)

    loaded.model.layers[1].input_layernorm.register_forward_hook(note)
    ratios = []
    for alpha in (None, 0.5, 1.0):
        if alpha is not None:
            smoothed(loaded, [rows.long()], family=Family(), alpha=alpha)
        loaded(input_ids=rows.long())
        ratios.append(float(largest["channels"].max() / largest["channels"].median()))
    assert ratios[0] > 0.5 * FACTOR
    assert ratios[1] < 4
    assert ratios[2] == pytest.approx(1.0, abs=1e-3)


@pytest.fixture(scope="module")
def outliers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six columns per matrix are 30 times as large as the others, and their group has one scale."""
    return make_outliers(model, tmp_path_factory.mktemp("outliers") / "model", activations=False)


def heldout_loss(folder: Path, tokens: Path) -> float:
    dataset = TokenDataset.open(tokens, split="heldout", sequence_length=SEQUENCE)
    rows = torch.from_numpy(dataset.read(range(dataset.windows))).long()
    with torch.no_grad():
        logits = load_model(folder, dtype=torch.float32)(input_ids=rows[:, :-1]).logits
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def test_gptq_and_smoothing_keep_an_outlier_model_that_rounding_destroys(
    model: Path, outliers: Path, tokens: Path, tmp_path: Path
) -> None:
    original = heldout_loss(model, tokens)
    assert heldout_loss(outliers, tokens) == pytest.approx(original, abs=1e-4)
    loses = {}
    for name, fields in {
        "rtn": {},
        "gptq": {"method": "gptq"},
        "smoothed": {"smoothing": 0.5},
        "both": {"method": "gptq", "smoothing": 0.5},
    }.items():
        (tmp_path / name).mkdir()
        packed_here(tmp_path / name, outliers, tokens, **{"scheme": "W4A16", **fields})
        loses[name] = heldout_loss(tmp_path / name / "small", tokens) - original
    assert loses["rtn"] > 1.4  # 1.5 nats; of the demo's student 2.4 (docs/how-to/quantization.md)
    assert all(loses[name] < 0.06 for name in ("gptq", "smoothed", "both")), loses


@pytest.mark.integration
def test_smoothed_int8_activations_are_nearer_by_every_consumer(model: Path, tokens: Path, tmp_path: Path) -> None:
    """The gate's KL, of outliers in the activations, which are rounded per token."""
    source = make_outliers(model, tmp_path / "outliers", activations=True)
    kl: dict[str, Any] = {}
    for name, fields in {"plain": {}, "smoothed": {"smoothing": 0.5}}.items():
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, source, tokens, scheme="W8A8", max_mean_kl=1.0, **fields)
        output_of(warm.run(ENTRY, "--config", config))
        details = json.loads((tmp_path / name / "small/manifest.json").read_text())["details"]
        assert details["quantization"]["smoothing"] == fields.get("smoothing")
        kl[name] = {who: each["mean_kl"] for who, each in details["consumers"].items() if "mean_kl" in each}
    assert kl["plain"].keys() == kl["smoothed"].keys() >= {"transformers"}
    for who, value in kl["smoothed"].items():
        assert value < 0.2 * kl["plain"][who], who


def test_other_architectures_and_files_without_norms_are_refused(model: Path, tokens: Path, tmp_path: Path) -> None:
    refused = partial(refusal, tmp_path, tokens=tokens)
    other = make_outliers(model, tmp_path / "phi", activations=True)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "phi"}))
    message = refused(other, scheme="W8A8", smoothing=0.5)
    assert "not for phi" in message
    assert "llama" in message
    assert "a type of GGUF files" in refused(model, scheme="Q8_0", smoothing=0.5)
    assert "smoothing" in refused(model, scheme="W8A8", smoothing=1.5)
    assert "calibration.samples" in refused(model, scheme="W8A8", smoothing=0.5, calibration={"samples": 10**6})


def test_outliers_are_where_they_are_said_to_be(model: Path, outliers: Path) -> None:
    before, after = (load_model(folder).model.layers[0].input_layernorm.weight for folder in (model, outliers))
    assert int((before / after > FACTOR / 2).sum()) == CHANNELS


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
    refused = partial(refusal, tmp_path, tokens=tokens, rotation=True)
    assert "is its embedding" in refused(model, scheme="W4A16")
    assert "a type of GGUF files" in refused(untied, scheme="Q8_0")
    for kind, expected in (("gemma2", "norms after its layers"), ("gpt2", "not for gpt2")):
        other = make_outliers(untied, tmp_path / kind, activations=True)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        assert expected in refused(other, scheme="W4A16")
