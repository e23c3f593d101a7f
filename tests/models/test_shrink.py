"""A shrunk config builds a tiny model of the same architecture, with the same code paths and divisibility."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel.architecture_trial import RandomValues
from pipeline.models.construction.materialize import materialize
from pipeline.models.construction.meta import build_meta
from pipeline.models.resize.scale import scale, section_of
from pipeline.models.resize.shrink import not_reached, shrink

REAL: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80},
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "mistral": {"sliding_window": 4096, "tie_word_embeddings": True},
    "gemma": {},
    "gemma3_text": {},
    "gpt2": {},
    "mixtral": {},
    "qwen3_moe": {},
    "phi3": {"pad_token_id": 5},
    "smollm3": {},
    "gpt_oss": {},
    "deepseek_v3": {},
}
LARGE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32},
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "gemma3_text": {"hidden_size": 640, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
    "gpt2": {},
    "mixtral": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8},
    "qwen3_moe": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 8},
}


def real(kind: str) -> PretrainedConfig:
    return CONFIG_MAPPING[kind](**REAL[kind])


@pytest.mark.parametrize("divide", [1, 2, 4])
@pytest.mark.parametrize("kind", REAL)
def test_a_shrunk_model_is_tiny_and_its_heads_divide_as_the_real_ones(kind: str, divide: int) -> None:
    config = real(kind)
    small = shrink(config, divide=divide, layers=4, vocab_size=256)
    model = build_meta(small, dtype=torch.float32, attn_implementation="eager")
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert (small.vocab_size, small.model_type) == (256, kind)
    assert small.num_hidden_layers >= 4
    for key in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, key, None) and getattr(config, key) % divide == 0:
            assert getattr(small, key) % divide == 0, key


@pytest.mark.parametrize("kind", REAL)
def test_fields_that_select_code_paths_are_kept(kind: str) -> None:
    config = real(kind)
    small = shrink(config, divide=2, layers=2, vocab_size=256)
    kept = ("tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "activation_function", "rope_parameters")
    for key in kept:
        assert getattr(small, key, None) == getattr(config, key, None), key
    heads, groups = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if groups:
        assert (small.num_attention_heads == small.num_key_value_heads) == (heads == groups)
    kinds, small_kinds = (getattr(each, "layer_types", None) for each in (config, small))
    if kinds:
        assert set(small_kinds) == set(kinds)
        assert small_kinds == kinds[: len(small_kinds)]
    if kind in ("qwen3", "gemma", "gemma3_text", "gpt_oss"):  # heads wider or narrower than the model
        assert heads * config.head_dim != config.hidden_size
        assert small.num_attention_heads * small.head_dim != small.hidden_size


def test_a_model_with_fewer_key_value_heads_than_ranks_keeps_fewer() -> None:
    small = shrink(real("llama"), divide=16, layers=2, vocab_size=256)
    assert (small.num_attention_heads % 16, small.num_key_value_heads) == (0, 8)


NAMED_OTHERWISE = (
    *("bamba", "granitemoehybrid", "falcon_h1", "zamba", "zamba2"),  # heads of Mamba-2; shared blocks
    *("gemma3n_text", "gemma4_text", "dots3_note_text"),  # lists, and sizes of single layers
    *("bailing_hybrid", "kimi_linear", "longcat_flash"),  # counts of experts
    *("blenderbot", "whisper", "codegen", "gptj", "xlnet"),  # heads
)


@pytest.mark.parametrize("kind", NAMED_OTHERWISE)
def test_an_architecture_whose_sizes_have_names_of_their_own_is_shrunk_to_one_that_runs(kind: str) -> None:
    model = build_meta(
        shrink(CONFIG_MAPPING[kind](), divide=1, layers=2, vocab_size=64),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    assert sum(p.numel() for p in model.parameters()) < 10_000_000
    materialize(model, RandomValues(model), device=torch.device("cpu"))
    with torch.no_grad():
        assert model(input_ids=torch.arange(8)[None], use_cache=False).logits.shape == (1, 8, 64)


def longrope(kind: str, **fields: Any) -> PretrainedConfig:
    factors = [1.0] * 48
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    given = {**rope, "factor": 32.0, "original_max_position_embeddings": 4096}
    return CONFIG_MAPPING[kind](rope_parameters=given, max_position_embeddings=131072, pad_token_id=0, **fields)


def test_a_threshold_that_real_sequences_cross_is_crossed_by_those_of_the_shrunk_model() -> None:
    lengths = {"crossed": (8192, 32), "not crossed": (4096, 32)}
    phi3 = {
        name: shrink(longrope("phi3"), divide=1, layers=2, vocab_size=64, lengths=each)
        for name, each in lengths.items()
    }
    thresholds = {name: each.rope_parameters["original_max_position_embeddings"] for name, each in phi3.items()}
    assert thresholds == {"crossed": 16, "not crossed": 4096}
    llama4 = CONFIG_MAPPING["llama4_text"]()
    small = shrink(llama4, divide=1, layers=2, vocab_size=64, lengths=(65536, 32))
    assert small.floor_scale == 16
    sparse = CONFIG_MAPPING["deepseek_v32"]()
    small = shrink(sparse, divide=1, layers=2, vocab_size=64, lengths=(8192, 32))
    assert small.index_topk == 16  # of 2,048: the selection of keys is none in sequences that are shorter


def test_a_threshold_that_is_not_reached_is_named() -> None:
    config = longrope("phi3")
    assert not_reached(config, lengths=(8192, 32))["rope_parameters.original_max_position_embeddings"] == 4096
    assert not not_reached(config, lengths=(2048, 32))
    shrunk = shrink(config, divide=1, layers=2, vocab_size=64, lengths=(8192, 32))
    assert not not_reached(shrunk, lengths=(8192, 32))


def test_yarns_original_length_is_kept_so_that_it_fits_the_factor() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8192}
    config = CONFIG_MAPPING["llama"](**REAL["llama"], max_position_embeddings=65536, rope_parameters=rope)
    small = shrink(config, divide=1, layers=2, vocab_size=64, lengths=(65536, 32))
    # transformers warns of another ratio
    assert small.max_position_embeddings / small.rope_parameters["original_max_position_embeddings"] == 8.0
    assert not not_reached(small, lengths=(65536, 32))


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
