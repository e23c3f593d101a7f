"""Experts and heads are packed under the names of model folders, and every loader finds them there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from foundation.errors import ConfigError, DataError
from foundation.section import parse
from pipeline.compress.quantization.config import QuantizeConfig
from pipeline.compress.quantization.rules import prepare
from pipeline.compress.quantization.sensitivity import changed
from pipeline.compress.quantization.weights import modules_of, pack, save
from pipeline.evaluation.consumers.consumer import CONSUMERS, VLLM_PYTHON, plan_consumers
from pipeline.evaluation.consumers.description import FOLDER, ModelDescription, describe
from pipeline.models.folder.compressed_folder import load_compressed
from pipeline.models.folder.loading import load_model, needs_own_loader
from pipeline.models.folder.model_folder import ModelFolder
from pipeline.models.unfused_experts import UnfusedExperts, folder_names, unfuse_experts
from tests.compress.quantization.test_quantize import packed_here, write_config
from tests.evaluation.consumers.test_gate import VLLM_NEEDS
from tests.evaluation.heldout.small import VOCAB
from tests.models.architectures import config_of

SHAPE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
EXPERTS = {"mixtral": {"intermediate_size": 96}, "qwen3_moe": {"moe_intermediate_size": 96, "norm_topk_prob": True}}
NAMES = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.2.w1",
    "qwen3_moe": "model.layers.1.mlp.experts.2.gate_proj",
}
IDS = torch.arange(40).reshape(2, 20)


@pytest.fixture(scope="module", params=list(EXPERTS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def moe(family: str, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with random weights, large enough that the logits differ."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("moe") / family
    fields = {**SHAPE, **EXPERTS[family], "num_key_value_heads": 1, "initializer_range": 0.1}
    AutoModelForCausalLM.from_config(config_of(family, vocab_size=VOCAB, **fields)).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokens / "tokenizer").save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits.float()
    return found


def test_unfused_experts_compute_the_same_and_have_the_names_of_folders(family: str, moe: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(moe)
    expected = logits(model)
    assert unfuse_experts(model) == 2
    assert torch.allclose(logits(model), expected, atol=1e-5)
    names = folder_names(model, [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)])
    tensors = ModelFolder.open(moe).tensors
    assert NAMES[family] in names.values()
    assert {f"{name}.weight" for name in names.values()} <= tensors.keys()


def test_experts_of_an_unknown_form_are_named(moe: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(moe)
    model.model.layers[0].mlp.experts.bias = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(DataError, match="cannot be taken apart"):
        unfuse_experts(model)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "W8A8", "FP8"])
def test_packed_experts_are_what_is_loaded(family: str, scheme: str, moe: Path, tokens: Path, tmp_path: Path) -> None:
    """Our loader gives the logits of a model whose weights are rounded and whose inputs are, where the scheme does."""
    plan = packed_here(tmp_path, moe, tokens, scheme=scheme, consumers=[])
    folder = ModelFolder.open(tmp_path / "small")
    assert f"{NAMES[family]}.weight_scale" in folder.tensors
    assert not [name for name in plan.layers if name.endswith(".gate")]  # routers
    assert all(router in folder.config["quantization_config"]["ignore"] for router in plan.routers)
    assert len(plan.routers) == 2
    loaded = load_model(tmp_path / "small", dtype=torch.float32)
    assert any(isinstance(module, UnfusedExperts) for module in loaded.modules())
    expected = load_model(moe, dtype=torch.float32)
    before = logits(expected)
    unfuse_experts(expected)
    with changed([modules_of(expected)[name] for name in plan.layers], scheme, torch.float32):
        assert torch.allclose(logits(loaded), logits(expected), atol=1e-3)
        assert not torch.allclose(logits(loaded), before, atol=1e-2)


def test_transformers_gives_the_same_as_our_loader_where_it_can(moe: Path, tokens: Path, tmp_path: Path) -> None:
    packed_here(tmp_path, moe, tokens, scheme="W4A16", consumers=[])
    folder = ModelFolder.open(tmp_path / "small")
    assert needs_own_loader(folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.allclose(logits(theirs), logits(load_compressed(folder)), atol=1e-4)


def test_an_expert_that_no_token_goes_to_is_rounded_to_the_nearest(moe: Path, tokens: Path, tmp_path: Path) -> None:
    """A router without preference sends every token to the same experts; only they are calibrated."""
    model = AutoModelForCausalLM.from_pretrained(moe)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    model.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast.from_pretrained(tokens / "tokenizer").save_pretrained(tmp_path / "model")
    made = {}
    for method in ("rtn", "gptq"):
        (tmp_path / method).mkdir()
        fields = {"scheme": "W4A16", "method": method, "calibration": {"samples": 16}, "consumers": []}
        config = write_config(tmp_path / method, tmp_path / "model", tokens, **fields)
        plan = prepare(parse(QuantizeConfig, json.loads(config.read_text())))
        loaded = load_model(tmp_path / "model", dtype=torch.float32)
        save(loaded, pack(loaded, plan, dtype=torch.float32), tmp_path / method / "small")
        made[method] = load_model(tmp_path / method / "small", dtype=torch.float32)
    for one, other in zip(*(made[each].model.layers for each in ("rtn", "gptq")), strict=True):
        pairs = zip(one.mlp.experts, other.mlp.experts, strict=True)
        same = [all(map(torch.equal, first.parameters(), second.parameters())) for first, second in pairs]
        assert same.count(False) == model.config.num_experts_per_tok < len(same)


def test_a_head_has_its_own_scheme_and_a_tied_one_its_own_weights(model: Path, tokens: Path, tmp_path: Path) -> None:
    fields = {"head": "W8A16", "untie": True, "dtype": "bfloat16"}
    plan = packed_here(tmp_path, model, tokens, scheme="W4A16", consumers=["transformers"], **fields)
    folder = ModelFolder.open(tmp_path / "small")
    assert {"lm_head.weight_packed", "model.embed_tokens.weight"} <= folder.tensors.keys()
    assert folder.config["tie_word_embeddings"] is False
    assert {each.name for each in plan.schemes.values()} == {"W8A16", "W4A16"}
    ours, theirs = load_model(tmp_path / "small"), AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-3)
    assert 0 < (logits(ours) - logits(load_model(model))).abs().max() < 2


def test_a_routers_bias_keeps_fp32_beside_weights_of_16_bits(tokens: Path, tmp_path: Path) -> None:
    """Neighbours that differ by 1e-4 are one number in bf16, and would choose other experts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("deepseek_v3", vocab_size=VOCAB)).bfloat16()
    biases = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
    for module in biases:
        module.e_score_correction_bias = torch.tensor([3.0001, 3.0002, 3.0003, 3.0004])
    model.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast.from_pretrained(tokens / "tokenizer").save_pretrained(tmp_path / "model")
    config = write_config(tmp_path, tmp_path / "model", tokens, consumers=[])
    plan = prepare(parse(QuantizeConfig, json.loads(config.read_text())))
    loaded = load_model(tmp_path / "model", dtype=torch.float32)
    save(loaded, pack(loaded, plan, dtype=torch.bfloat16), tmp_path / "small")
    result = load_model(tmp_path / "small")  # in its own dtype
    kept = [each for name, each in result.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(kept) == len(biases) == 2
    assert all(torch.equal(each, biases[0].e_score_correction_bias) for each in kept)
    assert result.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "consumer", "why"),
    [
        ({"experts": frozenset({"W8A8"})}, "transformers", "8-bit integers"),
        ({"experts": frozenset({"W4A16", "FP8"})}, "transformers", "one scheme"),
        ({"dense": frozenset({"W4A16"}), "plain_experts": True}, "transformers", "in floating point"),
        ({"experts": frozenset({"FP8"})}, "vllm", "use W8A8"),
        ({"experts": frozenset({"W4A16"}), "experts_group": 32}, "vllm", "group_size 64"),
        ({"experts": frozenset({"W8A8"}), "grouped_routing": True}, "vllm", "DeepSeek's routing"),
        ({"latent": True}, "vllm", "DeepSeek's latent heads"),
    ],
)
def test_what_a_consumer_cannot_take_is_said_before_the_work(
    fields: dict[str, Any], consumer: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.evaluation.consumers.consumer._has", lambda _extension: True)
    about = ModelDescription(FOLDER, "mixed", 64, **fields)
    assert re.search(why, str(CONSUMERS[consumer].refuses(about)))


def test_a_folder_is_described_as_it_was_planned(moe: Path, tokens: Path, tmp_path: Path) -> None:
    packed_here(tmp_path, moe, tokens, scheme="W4A16", group_size=16, consumers=[])
    found = describe(tmp_path / "small")
    assert (found.scheme, found.experts, found.experts_group) == ("W4A16", frozenset({"W4A16"}), 16)


@pytest.mark.parametrize(
    ("scheme", "head", "skip", "loads"),
    [
        ("W4A16", "FP8", "re:.*experts.*", False),
        ("W4A16", "W8A8", "re:.*layers.1.*experts.*", False),
        ("FP8", "W4A16", "re:.*experts.*", True),
    ],
)
def test_experts_that_stay_are_refused_for_transformers_where_it_cannot_load_them(
    scheme: str, head: str, skip: str, loads: bool, moe: Path, tokens: Path, tmp_path: Path
) -> None:
    """And what is known before the work is what the written folder shows."""
    fields = {"scheme": scheme, "skip": ["lm_head", skip], "head": head, "consumers": ["transformers"]}
    if loads:
        packed_here(tmp_path, moe, tokens, **fields)
        assert torch.isfinite(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "small"))).all()
    else:
        with pytest.raises(ConfigError, match="experts in floating point"):
            prepare(parse(QuantizeConfig, json.loads(write_config(tmp_path, moe, tokens, **fields).read_text())))
        packed_here(tmp_path, moe, tokens, **fields | {"consumers": []})
        with pytest.raises(RuntimeError, match="conversion"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert describe(tmp_path / "small").plain_experts is not loads


def test_a_consumer_named_that_cannot_take_experts_is_a_refusal(moe: Path, tokens: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, moe, tokens, scheme="W8A8", consumers=["transformers"])
    with pytest.raises(ConfigError, match="transformers cannot load experts"):
        prepare(parse(QuantizeConfig, json.loads(config.read_text())))


def test_a_model_that_nothing_here_serves_is_said_to_be_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    dense = ModelDescription(FOLDER, "FP8", 64, dense=frozenset({"FP8"}))
    assert plan_consumers(dense).warning() is None
    nothing = plan_consumers(replace(dense, experts=frozenset({"W8A8"}))).warning()
    assert nothing.splitlines()[0].startswith("warning: no program that serves the result")
    assert "transformers: transformers cannot load experts" in nothing
    flags = set(Path("/proc/cpuinfo").read_text().split())
    lacks = "need AMX, which this processor does not have" if flags & VLLM_NEEDS["W8A8"] else "without VNNI"
    assert (VLLM_PYTHON if "amx_tile" in flags else lacks) in nothing
