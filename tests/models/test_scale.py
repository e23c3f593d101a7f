"""A scaled config keeps the architecture and the proportions of the large model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from headrace.base.errors import ConfigError
from pipeline.models.construction.meta import build_meta
from pipeline.models.resize.scale import scale, section_of

LARGE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32},
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "gemma3_text": {"hidden_size": 640, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
    "gpt2": {},
    "mixtral": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8},
    "qwen3_moe": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 8},
}


def large(kind: str) -> PretrainedConfig:
    return CONFIG_MAPPING[kind](**LARGE[kind])


def parameters(config: PretrainedConfig) -> int:
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("width", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("kind", LARGE)
def test_a_scaled_model_builds_with_the_proportions_of_the_large_one(kind: str, width: float) -> None:
    config = large(kind)
    small = scale(config, width)
    ratio = small.hidden_size / config.hidden_size
    assert ratio == pytest.approx(width, abs=0.05)
    heads, groups = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if groups:
        assert small.num_attention_heads / small.num_key_value_heads == heads / groups
    if getattr(config, "intermediate_size", None):
        assert small.intermediate_size / small.hidden_size == pytest.approx(
            config.intermediate_size / config.hidden_size, rel=0.05
        )
    assert small.initializer_range == pytest.approx(config.initializer_range / ratio**0.5)
    assert (small.vocab_size, small.model_type) == (config.vocab_size, kind)
    assert parameters(small) < parameters(config)


def test_heads_keep_their_size_where_there_are_enough_of_them() -> None:
    small = scale(large("llama"), 0.25)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (8, 2, 128)
    assert small.num_hidden_layers == 8


def test_a_model_of_few_heads_keeps_their_number() -> None:
    config = CONFIG_MAPPING["llama"](
        hidden_size=192, num_attention_heads=6, num_key_value_heads=2, intermediate_size=512, num_hidden_layers=3
    )
    small = scale(config, 0.25)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim, small.hidden_size) == (6, 2, 8, 48)
    assert small.num_hidden_layers == 3, "a depth of four or less is kept"


def test_every_layer_type_stays() -> None:
    config = large("gemma3_text")
    assert set(scale(config, 0.25).layer_types) == set(config.layer_types)


def test_the_section_has_what_was_given_and_what_was_scaled() -> None:
    given = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "tie_word_embeddings": True}
    config = CONFIG_MAPPING["llama"](**given)
    section = section_of(scale(config, 0.25), config, given)
    assert section["tie_word_embeddings"] is True
    assert (section["hidden_size"], section["num_hidden_layers"]) == (1024, 8)
    assert "vocab_size" not in section, "it follows from the tokenizer, as in the large run"


@pytest.mark.parametrize("kind", ["deepseek_v3", "mamba2", "gptj"])
def test_sizes_that_are_not_known_to_scale_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="try: use an architecture with plain attention"):
        scale(CONFIG_MAPPING[kind](), 0.5)
