"""QK-Clip is accepted where scaling a head's weights scales its logits alone, and refused by name elsewhere."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel.architecture_trial import random_model
from pipeline.engines.parallel.qk_clip_check import attention_logits, check_qk_clip, scales_alone
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction.meta import build_meta
from pipeline.models.query_key_rows import attention_heads
from tests.engines.parallel.layouts import resolved
from tests.models.architectures import CONFIGS, config_of
from tests.sweeps.families import families, tiny_fields

CLIPPED: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"qk_clip": 100}}}
NORMS = {"qwen3", "qwen3_moe", "gemma3_text"}
LEAST_ACCEPTED = 58
"""Families of transformers 5.23 that QK-Clip takes as they are in the sweep, at least."""


def refusal(config: PretrainedConfig) -> str | None:
    model = build_meta(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    try:
        check_qk_clip(resolved(world_size=1, **CLIPPED), model)
    except ConfigError as refused:
        return str(refused)
    return None


def heads_that_do_not_scale(config: PretrainedConfig) -> list[tuple[str, int, float]]:
    model = random_model(config, attention=ATTENTION_NAME).eval()
    logits = attention_logits(model)
    assert logits
    layers = {model.get_submodule(each.name).layer_idx: each for each in reversed(attention_heads(model))}
    return [
        (layers[layer].name, head, factor)
        for layer, own in logits.items()
        for head in range(len(own))
        for factor in (0.5, 64.0)
        if not scales_alone(model, layers[layer], head, factor, logits=own)
    ]


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - NORMS))
def test_each_head_is_scaled_exactly_and_alone(name: str) -> None:
    assert refusal(config_of(name)) is None
    assert heads_that_do_not_scale(config_of(name)) == []


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("qwen3", CONFIGS["qwen3"], r"q_norm and k_norm.*changes no logit.*no need of it"),
        ("gemma3_text", CONFIGS["gemma3_text"], r"q_norm and k_norm"),
        ("phi", {**CONFIGS["phi"], "qk_layernorm": True}, r"q_layernorm and k_layernorm"),
        ("gemma2", {**CONFIGS["gemma"], "head_dim": 8}, r"caps its attention logits at 50"),
        ("olmo", {**CONFIGS["llama"], "clip_qkv": 4.0, "pad_token_id": 0}, r"clamps queries and keys to \+-4"),
        ("gpt_oss", {**CONFIGS["mixtral"], "head_dim": 8}, r"attention sinks of gpt_oss"),
        ("bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 2}, r"bloom does not call headrace's own attention"),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2}, r"no softmax attention was found in mamba"),
    ],
)
def test_what_cannot_be_scaled_is_refused_by_name(kind: str, fields: dict[str, Any], why: str) -> None:
    given = {key: value for key, value in fields.items() if key != "model_type"}
    text = refusal(CONFIG_MAPPING[kind](vocab_size=64, **given))
    assert text is not None
    assert re.search(rf"(?s)optimizer.params.qk_clip = 100.*{why}.*try: remove it", text)


def test_of_latent_attention_the_part_of_a_key_that_all_heads_share_stays() -> None:
    model = build_meta(config_of("deepseek_v3"), dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    rows = attention_heads(model)[0].rows
    assert {name.rpartition("self_attn.")[2]: set(each.powers.tolist()) for name, each in rows.items()} == {
        "q_b_proj.weight": {0.5, 1.0},
        "kv_b_proj.weight": {0.5, 0.0},
    }


@pytest.mark.sweep
def test_of_all_families_those_that_are_accepted_scale_every_head_alone() -> None:
    accepted, wrong = [], {}
    for kind in families():
        fields = tiny_fields(kind)
        known = inspect.signature(CONFIG_MAPPING[fields.pop("model_type")].__init__).parameters
        fields |= {key: 1 for key in ("pad_token_id", "eos_token_id") if key in known}
        try:
            config = CONFIG_MAPPING[kind](**fields)
            text = refusal(config)
        except Exception:  # such a model cannot be built with this attention, whatever the optimizer
            continue
        if text is None:
            accepted.append(kind)
            found = heads_that_do_not_scale(config)
            wrong |= {kind: found} if found else {}
    assert wrong == {}
    assert len(accepted) >= LEAST_ACCEPTED, accepted
