"""The causal language models of transformers, each as a tiny model, for the sweep over families.

The config of a family is derived from its own defaults: sizes become small, whatever selects code paths stays.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

SIZES: dict[str, int | float] = {
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "dim_model"), 64),
    **dict.fromkeys(("d_inner", "attention_hidden_size", "lru_width", "word_embed_proj_dim", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("n_inner", "dim_ff", "mamba_expand_dim", "expert_ffn_hidden_size", "dff", "d_ff"), 96),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    "vocab_size": 512,
    # depth
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 4),
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_size", "d_kv", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("rotary_dim",), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    # experts
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    # states
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    # positions
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "keep_window_size"), 12),
    # lengths at which a model changes what it computes: below those of the sweep's sequences
    **dict.fromkeys(("original_max_position_embeddings", "floor_scale", "index_topk", "indexer_budget"), 16),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
}
"""Key of a config -> its value in a tiny model, where the family has the key and its default is not None."""

LEAST_TRAINED = 166
"""Families that the committed table says train, at least: raised with every run of the sweep, never lowered."""

GOALS = {"pp": (95, 0), "tp": (80, 80), "cp": (85, 0), "masks": (90, 0), "ep": (0, 90)}
"""Column -> goal in percent of the decoders, and of those with experts."""
LEAST_EQUAL = {"dp": 133, "tp": 123, "pp": 130, "cp": 128, "masks": 126, "Muon": 129, "ep": 51, "aux": 51, "bias": 29}
"""Column -> decoders that the committed table says are equal to one process, at least: raised, never lowered."""

_PAD = {"pad_token_id": 1}
_MIXED = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0 + n / 8 for n in range(8)],
    "long_factor": [1.0 + n for n in range(8)],
}
_PER_LAYER_INPUT = {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16}
_GEMMA4 = {"layer_types": _MIXED, "per_layer_config": {str(n): {"head_dim": 32} for n in (1, 3)}, **_PER_LAYER_INPUT}

OVERRIDES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "rwkv": {"attention_hidden_size": 64},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "shared_experts_intermediate_size": 48,
        "layer_types": ["indexed_attention", "indexed_attention", "sliding_attention", "indexed_attention"],
        "head_dim": 32,
        "per_layer_config": {
            "2": {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "head_dim": 24,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            }
        },
    },
    "bailing_hybrid": {"layer_group_size": 2},
    "cohere_compass_text": {"layer_types": _MIXED, "rope_parameters": dict.fromkeys(_MIXED, _ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _MIXED, "laurel_rank": 8, **_PER_LAYER_INPUT},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {key: value for key, value in _GEMMA4.items() if key not in _PER_LAYER_INPUT},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "inkling_text": {"swa_head_dim": 16, "rel_extent": 16},
    "kimi_linear": {"linear_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "prophetnet": dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4)
    | dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2)
    | _PAD,
    "phi3": {"rope_parameters": _LONGROPE},
    "phimoe": {"rope_parameters": {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4}},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [2],
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": 500,
        "heads_per_ngram": 2,
        "split_ngram_parts": 2,
    },
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "feed_forward_size": 96,
        "hash_seed": 1,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    # the padding's id is also a position, below max_position_embeddings
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xglm"), _PAD),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), _PAD),
    "xlm": {"causal": True, "pad_token_id": 511},  # an id that does not occur
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX", **_PAD},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""Family -> keys that its tiny model needs besides `SIZES`."""

_DROPOUT = ("dropout", "pdrop", "layerdrop", "_drop", "jitter")


def families() -> list[str]:
    """Every `model_type` for which transformers has a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_decoder(kind: str) -> bool:
    """Whether a family is no encoder or encoder-decoder with a causal head."""
    others = MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys() | MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys()
    return kind not in others | {"bert-generation", "trocr", "whisper", "xlnet"}


def tiny_fields(kind: str) -> dict[str, Any]:
    """The `model.config` section of a tiny model of a family: no dropout, no router loss, sizes of `SIZES`."""
    config_class = CONFIG_MAPPING[kind]
    signature = inspect.signature(config_class.__init__).parameters
    defaults = {name: p.default for name, p in signature.items() if name not in ("self", "kwargs")}
    fields: dict[str, Any] = {}
    for key, default in defaults.items():
        if key == "num_key_value_heads" and default is not None and "kv_lora_rank" in defaults:
            fields[key] = SIZES["num_attention_heads"]  # latent attention has no groups
        elif key in SIZES and (default is not None or key == "head_dim"):
            fields[key] = SIZES[key]
        elif isinstance(default, float) and default > 0 and any(word in key for word in _DROPOUT):
            fields[key] = 0.0
        elif key == "output_router_logits" and default:
            fields[key] = False
        elif key == "is_decoder":
            fields[key] = True
    return {"model_type": kind, **fields, **OVERRIDES.get(kind, {})}
