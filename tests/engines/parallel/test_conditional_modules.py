"""Modules that are called as often as the data want, which ZeRO-3 has to gather in one block."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from pipeline.engines.parallel.conditional_modules import conditional_blocks

_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_key_value_heads": 2}
_DBRX = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
}


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("dbrx", _DBRX, ["DbrxExperts"]),  # calls a module for every expert that a token goes to
        ("qwen3_moe", {**_HEADS, **_EXPERTS, "head_dim": 16}, []),  # computes all experts in one module
        ("llama", _HEADS, []),
    ],
)
def test_blocks_of_conditional_modules_are_found(kind: str, fields: dict[str, Any], expected: list[str]) -> None:
    assert [block.__name__ for block in conditional_blocks(CONFIG_MAPPING[kind](**fields))] == expected
