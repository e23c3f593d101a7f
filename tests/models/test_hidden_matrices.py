"""Which parameters of which architecture are hidden matrices or routers, and what a fused tensor consists of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from foundation.errors import ConfigError
from foundation.section import parse
from pipeline.config.sections.optimizers import OptimizerSection
from pipeline.engines.common import matrices_of
from pipeline.models.construction.meta import build_meta
from pipeline.models.construction.stored_names import groups_of_model
from pipeline.models.hidden_matrices import MatrixForm, hidden_matrices, unknown_fused
from pipeline.models.query_key_rows import attention_heads
from pipeline.models.router_names import is_router
from pipeline.models.routers import find_routers, has_experts
from tests.sweeps.families import families, tiny_fields

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}
GROUPED = {**LLAMA, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
GATED = {**GROUPED, "layer_types": ["full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {**LLAMA, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
          "v_head_dim": 16, "first_k_dense_replace": 1}  # fmt: skip
DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}}  # fmt: skip
MPT = {"d_model": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 64}

FUSED: list[tuple[str, dict[str, Any], str, MatrixForm]] = [
    ("gpt2", GPT2, "attn.c_attn.weight", MatrixForm((32, 96), (32, 32, 32), transposed=True)),
    ("phi3", GROUPED | {"pad_token_id": 0}, "self_attn.qkv_proj.weight", MatrixForm((64, 32), (32, 16, 16))),
    ("phi3", GROUPED | {"pad_token_id": 0}, "mlp.gate_up_proj.weight", MatrixForm((96, 32), (48, 48))),
    ("mpt", MPT, "attn.Wqkv.weight", MatrixForm((96, 32), (32, 32, 32))),
    ("gpt_neox", LLAMA, "attention.query_key_value.weight", MatrixForm((96, 32), (8, 8, 8), groups=4)),
    ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}, "self_attention.query_key_value.weight",
     MatrixForm((96, 32), (8, 8, 8), groups=4)),
    ("falcon", LLAMA, "self_attention.query_key_value.weight", MatrixForm((48, 32), (32, 8, 8))),
    ("falcon", {**LLAMA, "new_decoder_architecture": True, "num_kv_heads": 2}, "self_attention.query_key_value.weight",
     MatrixForm((64, 32), (16, 8, 8), groups=2)),
    ("gpt_bigcode", GPT2, "attn.c_attn.weight", MatrixForm((48, 32), (32, 8, 8))),
    ("mixtral", EXPERTS, "mlp.experts.gate_up_proj", MatrixForm((4, 96, 32), (48, 48))),
    ("mixtral", EXPERTS, "mlp.experts.down_proj", MatrixForm((4, 32, 48), (32,))),
    ("gpt_oss", EXPERTS, "mlp.experts.gate_up_proj", MatrixForm((4, 32, 96), (1, 1), transposed=True, groups=48)),
    ("gpt_oss", EXPERTS, "mlp.experts.down_proj", MatrixForm((4, 48, 32), (32,), transposed=True)),
    ("mamba", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}, "mixer.in_proj.weight",
     MatrixForm((128, 32), (64, 64))),
    ("qwen3_next", GATED, "self_attn.q_proj.weight", MatrixForm((64, 32), (8, 8), groups=4)),
    ("modernbert-decoder", LLAMA | {"pad_token_id": 1}, "mlp.Wi.weight", MatrixForm((96, 32), (48, 48))),
    ("dbrx", DBRX, "ffn.experts.mlp.v1", MatrixForm((96, 32), (24,) * 4)),
    ("dbrx", DBRX, "ffn.experts.mlp.w2", MatrixForm((96, 32), (24,) * 4, inputs_first=True)),
]  # fmt: skip


def model_of(model_type: str, fields: dict[str, Any]) -> nn.Module:
    return build_meta(AutoConfig.for_model(model_type, **fields), dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(("model_type", "fields", "name", "form"), FUSED, ids=[f"{m}-{n}" for m, _, n, _ in FUSED])
def test_a_fused_tensor_is_several_matrices(
    model_type: str, fields: dict[str, Any], name: str, form: MatrixForm
) -> None:
    found = hidden_matrices(model_of(model_type, fields))
    assert [each for key, each in found.items() if key.endswith(name)] == [form]
    assert unknown_fused(found) == []


OTHERS = {
    "gpt2": (GPT2, {"wte.weight", "wpe.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"}),
    "mixtral": (
        EXPERTS,
        {"embed_tokens.weight", "mlp.gate.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
         "norm.weight", "lm_head.weight"},
    ),
    "gpt_oss": (
        EXPERTS,
        {"embed_tokens.weight", "self_attn.sinks", "mlp.router.weight", "input_layernorm.weight",
         "post_attention_layernorm.weight", "norm.weight", "lm_head.weight"},
    ),
    "mamba": (
        {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64},
        {"embeddings.weight", "mixer.A_log", "mixer.D", "mixer.conv1d.weight", "norm.weight", "norm_f.weight"},
    ),
    "opt": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "ffn_dim": 48,
         "word_embed_proj_dim": 16},
        {"embed_tokens.weight", "embed_positions.weight", "self_attn_layer_norm.weight", "final_layer_norm.weight",
         "project_in.weight", "project_out.weight"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", OTHERS)
def test_embeddings_head_norms_biases_routers_kernels_and_decay_rates_are_no_hidden_matrices(model_type: str) -> None:
    fields, expected = OTHERS[model_type]
    model = model_of(model_type, fields)
    left = [name for name, _ in model.named_parameters() if name not in hidden_matrices(model)]
    assert {name for name in left if "bias" not in name and not name.endswith(tuple(expected))} == set()
    assert all(any(name.endswith(each) for name in left) for each in expected)


def test_a_projection_that_may_be_fused_and_is_not_known_is_named() -> None:
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "num_heads": 8, "head_dim": 8, "n_groups": 1}
    found = hidden_matrices(model_of("mamba2", fields))
    assert unknown_fused(found) == ["mixer.in_proj.weight"]


@pytest.mark.parametrize(
    "form",
    [
        MatrixForm((16, 8), (8, 4, 4)),
        MatrixForm((12, 8), (2, 2, 2), groups=2),
        MatrixForm((3, 5, 8), (1, 1), transposed=True, groups=4),
        MatrixForm((12, 8), (4, 4, 4), inputs_first=True),
    ],
)
def test_splitting_and_writing_are_inverse(form: MatrixForm) -> None:
    stored = torch.arange(float(torch.tensor(form.shape).prod())).view(form.shape)
    parts = form.split(stored)
    assert [tuple(part.shape[-2:]) for part in parts] == list(form.matrices)
    again = torch.empty_like(stored)
    form.write(parts, again)
    assert torch.equal(again, stored)


def test_the_parts_of_gpt_neox_are_its_queries_keys_and_values() -> None:
    """Its own forward pass decides what they are: the rows that change the queries alone are the first part."""
    config = AutoConfig.for_model("gpt_neox", **LLAMA, rotary_pct=0.25)
    model: Any = build_meta(config, dtype=torch.float32, attn_implementation="eager").to_empty(device="cpu")
    attention = model.gpt_neox.layers[0].attention
    [(name, form)] = [each for each in hidden_matrices(model).items() if "query_key_value" in each[0]]
    weight: Tensor = model.get_parameter(name).data.normal_()
    parts = form.split(weight)
    hidden = torch.randn(1, 3, 32)
    fused = torch.nn.functional.linear(hidden, weight).view(1, 3, 4, -1).transpose(1, 2)
    for theirs, ours in zip(fused.chunk(3, dim=-1), parts, strict=True):  # as in its forward pass
        mine = torch.nn.functional.linear(hidden, ours).view(1, 3, 4, -1).transpose(1, 2)
        assert torch.allclose(theirs, mine, atol=1e-5)
    assert attention.head_size == 8


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no hidden matrix was found"):
        matrices_of(nn.Sequential(nn.Embedding(4, 4)), parse(OptimizerSection, {"type": "Muon"}))


ODD_COUNT = 7  # as many as nothing else in a tiny model has
ROUTED = sorted(kind for kind in families() if has_experts(tiny_fields(kind)))


def meta_of(kind: str) -> nn.Module | None:
    fields: dict[str, Any] = tiny_fields(kind) | ({"is_moe": True} if kind == "doge" else {})
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    fields |= {key: ODD_COUNT for key in counts if key in fields} | {"pad_token_id": 0, "eos_token_id": 0}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    except (
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        StrictDataclassError,
    ):  # this family's sizes do not fit together
        return None


def test_every_router_of_every_family_is_known_by_its_name() -> None:
    """Those that transformers names, and every matrix with one output for each expert, by both of its names."""
    tried = 0
    for kind in ROUTED:
        model = meta_of(kind)
        if model is None:
            continue
        tried += 1
        names = {module: name for name, module in model.named_modules()}
        routers = {names[router.scores or router.module] for router in find_routers(model)}
        rows = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Embedding)}  # Doge's
        matrices = {name: p for name, p in model.named_parameters() if name.endswith(".weight") and p.ndim == 2}
        matrices = {name: p for name, p in matrices.items() if name not in rows}
        outputs = ODD_COUNT + getattr(model.config, "zero_expert_num", 0)  # LongCat's experts that hand tokens through
        routers |= {name.rpartition(".")[0] for name, p in matrices.items() if len(p) in (ODD_COUNT, outputs)}
        named = {name.rpartition(".")[0] for name in matrices if is_router(name.rpartition(".")[0])}
        assert routers <= named, kind
        stored = [group.key for group in groups_of_model(model, [f"{name}.weight" for name in routers])]
        assert all(is_router(name.removesuffix(".weight")) for name in stored), kind
    assert tried > 40


@pytest.mark.parametrize(
    "name", ["mlp.gate_proj", "mlp.gate_up_proj", "layers.0.mlp.experts.3.gate_proj", "attn.output_gate", "gates.0"]
)
def test_gated_layers_are_no_routers(name: str) -> None:
    assert not is_router(name)


def test_the_matrix_of_inputs_stored_first_is_that_of_the_product() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("dbrx", **DBRX))
    [experts] = [module for module in model.modules() if hasattr(module, "w2")]
    stored, x = experts.w2.detach(), torch.randn(3, 32)
    parts = {name: getattr(experts, name).detach().view(4, 24, 32)[2] for name in ("w1", "v1", "w2")}
    inner = experts.activation_fn(x @ parts["w1"].T) * (x @ parts["v1"].T)
    third = MatrixForm((96, 32), (24,) * 4, inputs_first=True).split(stored)[2]
    assert torch.allclose(experts(x, parts["w1"], parts["v1"], parts["w2"]), inner @ third.T, atol=1e-6)


def test_values_beside_keys_are_no_gates_though_each_changes_one_feature() -> None:
    found = hidden_matrices(model_of("deepseek_v3", LATENT))  # kv_b_proj has twice as many outputs as o_proj has inputs
    assert found["model.layers.0.self_attn.kv_b_proj.weight"] == MatrixForm((128, 16), (128,))


def test_qk_clip_scales_the_queries_of_gated_attention_and_not_the_gates() -> None:
    [heads] = attention_heads(model_of("qwen3_next", GATED))
    rows = heads.rows["model.layers.0.self_attn.q_proj.weight"]
    assert rows.powers.tolist() == ([0.5] * 8 + [0.0] * 8) * 4
    assert rows.heads.tolist() == [0] * 32 + [1] * 32
    assert heads.key_heads == 2
