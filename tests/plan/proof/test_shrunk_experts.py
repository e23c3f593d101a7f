"""What a proof trains of a mixture of experts, of every family of transformers: few experts, and a choice of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from foundation.section import parse
from pipeline.config.rules.resolve import resolve
from pipeline.config.sections.run import Config, ModelSection
from pipeline.models.construction.meta import build_meta
from pipeline.models.hf_config import resolve_hf_config
from pipeline.models.routers import has_experts
from pipeline.plan.proof.shrunk_run import SEQUENCE, VOCABULARY, shrink_run
from tests.conftest import tiny_config
from tests.sweeps.families import OVERRIDES, families

FIELDS: dict[str, dict[str, Any]] = {
    # what the defaults of transformers leave dense, or do not build
    "dbrx": {
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752},
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
    "doge": {"is_moe": True},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_moe": {"num_experts": 64, "moe_topk": 8, "head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen4_exp_text": {**OVERRIDES["qwen4_exp_text"], "indexer_head_dim": 256},
}
GROUPED = ("axk1", "bailing_hybrid", "beam", "deepseek_v2", "deepseek_v3", "deepseek_v32")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def proven(kind: str, work: Path, **fields: Any) -> PretrainedConfig:
    """The config of the model that a proof trains, read from its section as its ranks read it."""
    config = tiny_config(work / "nowhere", work / "run", engine="torch")
    config["model"] = {"config": {"model_type": kind, **FIELDS.get(kind, {}), **fields}, "attn_implementation": "eager"}
    small = shrink_run(resolve(parse(Config, config), world_size=2), steps=4, work=work)
    section = parse(ModelSection, small.config["model"])
    tokenizer = {"vocab_size": VOCABULARY, "bos_id": None, "eos_id": 0, "pad_id": None}
    return resolve_hf_config(section, tokenizer=tokenizer, sequence_length=SEQUENCE)


def experts_of(config: PretrainedConfig) -> set[int]:
    """The numbers of experts of the layers that have them: of stacked matrices, of modules in a list, or as named."""
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    stacked = {p.shape[0] for name, p in model.named_parameters() if "experts" in name and p.dim() == 3}
    lists = {len(m) for name, m in model.named_modules() if name.endswith("experts") and isinstance(m, nn.ModuleList)}
    named = {getattr(m, key, 0) for m in model.modules() for key in ("num_experts", "moe_num_experts")} - {0}
    return stacked | lists | named


def mixtures() -> list[str]:
    """The causal language models of transformers that are mixtures of experts, by their defaults or by `FIELDS`."""
    refused = ("gemma4_assistant", "gemma4_unified_assistant")  # transformers refuses its own defaults
    parts = "text_config"  # a folder of several parts: the decoder of text is a kind of its own
    others = [kind for kind in families() if kind not in refused and parts not in CONFIG_MAPPING[kind].sub_configs]
    return [kind for kind in others if kind in FIELDS or has_experts(CONFIG_MAPPING[kind]().to_dict())]


def test_a_proof_of_any_mixture_has_at_most_eight_experts_and_a_token_not_all_of_them(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {}
    kinds = mixtures()
    assert len(kinds) >= 50
    for kind in kinds:
        config = proven(kind, tmp_path)
        counts, fields = experts_of(config), config.to_dict()
        fields |= fields.get("ffn_config", {})
        chosen = max(fields.get(key) or 0 for key in CHOSEN)
        assert config.num_hidden_layers <= 12, kind
        if not counts or max(counts) > 8 or not 0 < chosen < max(counts) or config.hidden_size % 8:
            wrong[kind] = (counts, chosen, config.hidden_size)  # eight numbers are 16 bytes, a row of grouped products
    assert not wrong


def test_an_architecture_whose_layer_types_are_counted_is_proven_at_the_shrunk_number_of_layers(tmp_path: Path) -> None:
    config = proven("gpt_neo", tmp_path, num_layers=24)
    assert config.attention_layers == ["global", "local"] * (config.num_layers // 2) + ["global"] * (
        config.num_layers % 2
    )
    assert config.num_layers < 24


@pytest.mark.parametrize("kind", GROUPED)
def test_experts_that_are_chosen_by_groups_stay_so(kind: str, tmp_path: Path) -> None:
    config = proven(kind, tmp_path)
    assert (config.n_group, config.topk_group, experts_of(config)) == (2, 1, {8})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("afmoe", {"num_dense_layers": 2}),
        ("deepseek_v2", {"first_k_dense_replace": 3}),
        ("ernie4_5_moe", {"moe_layer_start_index": 3, "moe_layer_interval": 3}),
        ("jamba", {"expert_layer_period": 4, "expert_layer_offset": 3}),
        ("llama4_text", {"interleave_moe_layer_step": 4}),
        ("qwen3_moe", {"decoder_sparse_step": 3}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    ],
)
def test_a_model_whose_first_layers_are_dense_is_deep_enough_to_have_experts(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    assert experts_of(proven(kind, tmp_path, **fields)) == ({8} if kind in GROUPED else {4})
