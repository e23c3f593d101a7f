"""Folders with one tensor per expert, fused or renamed tensors, or fp8: read, and written as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from foundation.errors import DataError
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta, parameter_shapes
from pipeline.models.construction.stored_names import groups_of_model
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.models.hf_config import read_hf_config

_HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 4}
_SIZES = {**_HEADS, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": ({"num_local_experts": 4}, "model.layers.1.block_sparse_moe.experts.3.w1.weight"),
    "qwen3_moe": ({**_EXPERTS, "head_dim": 8}, "model.layers.1.mlp.experts.3.gate_proj.weight"),
    "deepseek_v3": ({**_LATENT, **_ROUTED, "first_k_dense_replace": 1}, "model.layers.1.mlp.experts.3.up_proj.weight"),
    "glm4_moe": ({**_ROUTED, "first_k_dense_replace": 1}, "model.layers.1.mlp.experts.3.down_proj.weight"),
    "phi3": ({"pad_token_id": 0}, "model.layers.1.self_attn.qkv_proj.weight"),
    "gpt_neox": ({}, "embed_out.weight"),
    "gpt2": ({"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}, "transformer.h.1.attn.c_attn.weight"),
}
"""model_type -> keys of a tiny model, and a name that is in the files on the Hub."""


def fresh(kind: str) -> PreTrainedModel:
    fields = MODELS[kind][0] | (_SIZES if kind != "gpt2" else {"vocab_size": 64})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields), attn_implementation="eager")
    for number, buffer in enumerate(model.buffers()):
        if buffer.ndim == 1 and buffer.shape[0] == 4:  # the bias of a router
            buffer.copy_(torch.arange(4.0) + number)
    assert isinstance(model, PreTrainedModel)
    return model


def on_meta(folder: Path) -> nn.Module:
    return build_meta(read_hf_config(folder), dtype=torch.float32, attn_implementation="eager")


def read(folder: Path) -> nn.Module:
    """The folder's model, filled from its files as training does it."""
    model = on_meta(folder)
    materialize(model, FromSafetensors(folder, model=model), device=torch.device("cpu"))
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_that_transformers_wrote_is_read_with_its_values(kind: str, tmp_path: Path) -> None:
    model = fresh(kind)
    model.save_pretrained(tmp_path)
    assert MODELS[kind][1] in load_file(tmp_path / "model.safetensors")
    assert same(read(tmp_path), model)


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_written_has_the_names_and_values_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    model = fresh(kind)
    model.save_pretrained(tmp_path)
    state = {name: value for name, value in model.state_dict().items() if name not in _tied(model)}
    written: dict[str, Tensor] = {}
    for group in groups_of_model(on_meta(tmp_path), state):
        written |= group.convert({name: state[name] for name in group.names}, model)
    expected = load_file(tmp_path / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def _tied(model: PreTrainedModel) -> set[str]:
    return set(model.all_tied_weights_keys)


def test_an_export_of_an_older_version_with_fused_experts_is_read(tmp_path: Path) -> None:
    model = fresh("mixtral")
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.gate_up_proj" in model.state_dict()
    assert same(read(tmp_path), model)


def test_a_folder_of_the_model_without_its_head_lacks_only_the_head(tmp_path: Path) -> None:
    model = fresh("qwen3_moe")
    model.model.save_pretrained(tmp_path)
    assert "layers.1.self_attn.q_proj.weight" in load_file(tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"missing \(1\): lm_head.weight\n  unexpected \(0\)"):
        FromSafetensors(tmp_path, model=on_meta(tmp_path))


def test_a_missing_expert_is_an_error_that_names_the_layer(tmp_path: Path) -> None:
    fresh("deepseek_v3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"model.layers.1.mlp.experts.down_proj has shape \(3, 32, 24\)"):
        FromSafetensors(tmp_path, model=on_meta(tmp_path))
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"experts.0.gate_proj.weight and 6 more do not make .*gate_up_proj"):
        FromSafetensors(tmp_path, model=on_meta(tmp_path))


def test_the_layers_for_several_tokens_that_transformers_ignores_are_no_error(tmp_path: Path) -> None:
    fresh("deepseek_v3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.61.eh_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    read(tmp_path)
    assert FromSafetensors(tmp_path, model=on_meta(tmp_path)).left_out == ["model.layers.61.eh_proj.weight"]


def test_weights_in_fp8_are_multiplied_by_the_scales_of_their_blocks(tmp_path: Path) -> None:
    """DeepSeek-V3's own files: every linear weight in e4m3, with a scale per block."""
    model = fresh("deepseek_v3")
    model.save_pretrained(tmp_path)
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        if "_proj" in name:
            blocks = torch.tensor([-(-size // 20) for size in value.shape])  # the last block is smaller
            scale = torch.rand(*blocks.tolist(), generator=torch.Generator().manual_seed(1)) + 0.5
            whole = scale.repeat_interleave(20, 0)[: value.shape[0]].repeat_interleave(20, 1)[:, : value.shape[1]]
            tensors[name] = (value / whole).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
        else:
            tensors[name] = value
    save_file(tensors, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [20, 20]}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": section}))
    found = read(tmp_path)
    assert not hasattr(found.config, "quantization_config")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=2**-4, atol=2e-3)  # 3 bits of mantissa


def test_a_folder_quantized_in_another_way_is_refused(tmp_path: Path) -> None:
    fresh("mixtral").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(DataError, match=r"quantized \(gptq\).*\n  try: the model that it was quantized from"):
        read_hf_config(tmp_path)


def test_names_of_a_plain_model_do_not_change(tmp_path: Path) -> None:
    fields = {"model_type": "llama", **_SIZES}
    config = CONFIG_MAPPING[str(fields.pop("model_type"))](**fields)
    model = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")
    names = list(parameter_shapes(model))
    groups = groups_of_model(model, names)
    assert sorted(group.key for group in groups) == sorted(names)
    materialize(model, InitByName(model, seed=0), device=torch.device("cpu"))
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert same(read(tmp_path), model)
