"""`model.keep_layers`: a model of some layers computes what the original does whose other layers do nothing."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from headrace.base.errors import ConfigError
from pipeline.engines.parallel.kept_layers import check_kept_layers
from pipeline.models.layers import keep_layers, original_name
from tests.sweeps.families import tiny_fields

KEPT = [0, 2, 3]


def config_of(kind: str, **fields: Any) -> PretrainedConfig:
    given = {**tiny_fields(kind), "pad_token_id": 0, **fields}
    return CONFIG_MAPPING[given.pop("model_type")](**given)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("smollm3", {}),  # every fourth layer has no RoPE
        ("bert", {}),  # its parameters are of encoder.layer.N
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}),
        ("deepseek_v3", {"first_k_dense_replace": 3}),
        ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 2}),
        *((kind, {}) for kind in ("llama", "gpt2", "gemma3_text", "llama4_text", "qwen3_next", "gpt_neo", "bamba")),
    ],
)
def test_kept_layers_compute_what_they_compute_in_the_original(kind: str, fields: dict[str, Any]) -> None:
    check_kept_layers(config_of(kind, **fields), KEPT)


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "computes other logits"),
        ("diffllama", {}, "computes other logits"),
        ("minicpm3", {}, "computes other logits"),  # residuals are divided by the number of layers
        ("jamba", {}, "fails"),  # every other layer has experts
        ("gemma3n_text", {}, "num_kv_shared_layers"),
    ],
)
def test_layers_that_depend_on_their_position_are_refused(kind: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.keep_layers = \[0, 2, 3\]\n(.|\n)*{why}"):
        check_kept_layers(config_of(kind, **fields), KEPT)


def test_layers_in_another_order_find_the_parameters_of_their_kind() -> None:
    check_kept_layers(config_of("qwen3_moe", mlp_only_layers=[0, 3]), [3, 2, 0])
    check_kept_layers(config_of("deepseek_v3", first_k_dense_replace=3), [0, 3, 2])
    with pytest.raises(ConfigError, match="may depend on their position"):
        check_kept_layers(config_of("deepseek_v3", first_k_dense_replace=3), [3, 2, 0])  # dense layers are the first


def test_what_a_config_says_of_layers_by_their_number_follows_them() -> None:
    small = keep_layers(config_of("qwen2_moe", decoder_sparse_step=2), KEPT)
    assert (small.decoder_sparse_step, small.mlp_only_layers) == (1, [0, 1])  # of 0 and 2; 1 and 3 have experts
    assert keep_layers(config_of("deepseek_v3", first_k_dense_replace=3), KEPT).first_k_dense_replace == 2
    assert keep_layers(config_of("smollm3"), KEPT).no_rope_layers == [1, 1, 0]
    assert keep_layers(config_of("xlstm"), KEPT).num_blocks == 3


def test_a_model_that_has_more_layers_than_are_kept_is_refused() -> None:
    rename = original_name(KEPT)
    assert rename("model.layers.2.norm.weight") == "model.layers.3.norm.weight"
    with pytest.raises(ConfigError, match=r"model.keep_layers = \[0, 2, 3\]\n.*still has model.layers.3.norm.weight"):
        rename("model.layers.3.norm.weight")
