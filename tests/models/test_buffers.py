"""Persistent buffers belong to a model as its parameters do: loaded, stored in every layout, verified, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from pipeline.checkpoint.export.read_weights import CheckpointWeights
from pipeline.models.construction.buffers import (
    buffer_shapes,
    computed_buffers,
    parameters_declared_fp32,
    persistent_buffers,
)
from pipeline.models.construction.initial_values import InitByName
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta, parameter_shapes
from pipeline.models.construction.stored_values import FromSafetensors
from pipeline.plan.proof.case import Case
from pipeline.plan.proof.tokens import write_tokens
from tests.parity.run import launch

V = 64
_HEADS = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_key_value_heads": 4,
}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", **_HEADS, **_LATENT, **_ROUTED, "first_k_dense_replace": 1}
MINIMAX = {"model_type": "minimax", **_HEADS, "num_local_experts": 4, "head_dim": 8}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def config_of(fields: dict[str, Any]) -> PretrainedConfig:
    given = {**fields, "vocab_size": V}
    return CONFIG_MAPPING[given.pop("model_type")](**given)


def on_meta(fields: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> nn.Module:
    return build_meta(config_of(fields), dtype=dtype, attn_implementation="eager")


def write_folder(path: Path, fields: dict[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """A model folder whose router biases are far from their initial zeros; returns the biases."""
    model = on_meta(fields)
    materialize(model, InitByName(model, seed=1), device=torch.device("cpu"))
    for number, buffer in enumerate(persistent_buffers(model).values()):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(100 * seed + number)))
    path.mkdir()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path / "model.safetensors")
    model.config.save_pretrained(path)  # type: ignore[union-attr, operator]
    return persistent_buffers(model)


def test_a_router_bias_is_persistent_and_fp32_and_a_rotary_table_is_not_stored() -> None:
    model = on_meta(DEEPSEEK_V3, dtype=torch.bfloat16)
    assert buffer_shapes(model) == {BIAS: (4,), BIAS.replace("1", "2"): (4,)}
    assert {buffer.dtype for buffer in persistent_buffers(model).values()} == {torch.float32}


def test_buffers_that_no_values_have_are_those_of_the_models_own_code() -> None:
    model = on_meta(MINIMAX)
    found = computed_buffers(model, InitByName(model, seed=1))
    genuine = AutoModelForCausalLM.from_config(config_of(MINIMAX), attn_implementation="eager")
    expected = persistent_buffers(genuine)
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(buffer.is_meta for buffer in persistent_buffers(model).values())  # the model itself is unchanged


def test_a_folder_with_router_biases_is_loaded_and_one_of_an_older_export_gets_fresh_ones(tmp_path: Path) -> None:
    biases, model = write_folder(tmp_path / "model", DEEPSEEK_V3), on_meta(DEEPSEEK_V3)
    values = FromSafetensors(tmp_path / "model", model=model)
    found = computed_buffers(model, values)
    assert torch.equal(found[BIAS], biases[BIAS])
    weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(model).items()}
    save_file(weights, tmp_path / "model/model.safetensors")
    values = FromSafetensors(tmp_path / "model", model=model)
    assert computed_buffers(model, values)[BIAS].tolist() == [0.0] * 4


def test_a_parameter_that_the_architecture_freezes_is_a_persistent_buffer() -> None:
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "num_dense_layers": 1}
    heads = {**_HEADS, "head_dim": 8, "moe_intermediate_size": 24, "layer_types": ["full_attention"] * 3}
    model = on_meta({"model_type": "afmoe", **heads, **fields})
    assert {name.rsplit(".", 1)[1] for name in buffer_shapes(model)} == {"expert_bias"}
    assert all(parameter.requires_grad for parameter in model.parameters())


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "zero-1": ({"zero_optimization": {"stage": 1}}, 2),
    "zero-3": ({"zero_optimization": {"stage": 3}}, 2),
    "fsdp2": ({"engine": "torch", "zero_optimization": {"stage": 3}}, 2),
    "pp": ({"engine": "torch", "parallel": {"pp": 2}}, 2),
    "deepspeed-pp": ({"parallel": {"pp": 2}}, 2),
}
LENGTH = {"train_batch_size": 8, "gradient_accumulation_steps": 4}


@pytest.mark.sweep
def test_every_layout_stores_buffers_and_resumes_from_those_of_another(tmp_path: Path) -> None:
    biases = {name: write_folder(tmp_path / name, DEEPSEEK_V3, seed=seed) for seed, name in enumerate("ab")}
    tokens = write_tokens(tmp_path / "tokens", vocab_size=V, tokens=3000, longest=40)
    cases: list[Case] = []
    folders = {"plain": "a", "other": "b"} | {name: "ab"[number % 2] for number, name in enumerate(LAYOUTS)}
    for name, folder in folders.items():
        fields, processes = LAYOUTS.get(name, ({"engine": "torch"}, 1))
        config = {
            "engine": "deepspeed",
            **LENGTH,
            **fields,
            "model": {"path": str(tmp_path / folder), "attn_implementation": "eager"},
            "data": {"sources": [{"path": str(tokens)}], "sequence_length": 16},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "run": {"dir": "replaced", "steps": 3, "seed": 7},
        }
        # of the folder with other biases
        cases.append(Case(name, config, processes, save=(1,), resume_from=(cases[-1].name, 1) if cases else None))
    results = launch(cases, tmp_path)
    curves = {"a": results["plain"][1].losses, "b": results["other"][1].losses}
    assert curves["a"] != curves["b"]
    for name, (case, result) in results.items():
        assert result.error is None, f"{name}: {result.error}"
        assert result.losses == pytest.approx(curves[folders[name]], abs=2e-5), name
        weights = CheckpointWeights(result.state(1))
        assert weights.buffers.keys() == biases["a"].keys()
        for each, value in biases[folders[name]].items():
            stored = weights.buffer(each)
            assert stored is not None
            assert torch.equal(stored, value), (name, each)
        for step, loss in result.resumed_losses.items():
            assert loss == pytest.approx(curves[folders[case.resume_from[0]]][step], abs=2e-5), name


def test_parameters_that_transformers_keeps_in_fp32_are_found_by_patterns_of_several_parts() -> None:
    model = build_meta(
        CONFIG_MAPPING["deepseek_v3"](**{k: v for k, v in DEEPSEEK_V3.items() if k != "model_type"}, vocab_size=V),
        dtype=torch.bfloat16,
        attn_implementation="eager",
    )
    model._keep_in_fp32_modules_strict = {"mlp.gate.weight", "e_score_correction_bias"}
    found = parameters_declared_fp32(model)
    assert found == [name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert found
