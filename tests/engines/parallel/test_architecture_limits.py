"""Layouts and QK-Clip on an architecture that does not support them are refused early, with field and remedy."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel import decoder, ring
from pipeline.engines.parallel.architecture_limits import check_layout
from pipeline.engines.parallel.architecture_trial import random_model
from pipeline.engines.parallel.qk_clip_check import attention_logits, check_qk_clip, scales_alone
from pipeline.models import attention as own_attention
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.construction import meta
from pipeline.models.construction.meta import build_meta
from pipeline.models.query_key_rows import attention_heads
from tests.engines.parallel.layouts import T, resolved
from tests.models.architectures import ADAPTED, CONFIGS, config_of, family_config, family_meta, meta_of
from tests.sweeps.families import families

PP2: dict[str, Any] = {"parallel": {"pp": 2}}
TP2: dict[str, Any] = {"parallel": {"tp": 2}}
CP2: dict[str, Any] = {"parallel": {"cp": 2}}
RING: dict[str, Any] = {"parallel": {"cp": 2, "cp_method": "ring"}}
CHUNK: dict[str, Any] = {"loss": {"chunk": 8}}
MASKED: dict[str, Any] = {"data": {"sources": [{"path": "n"}], "sequence_length": T, "mask_documents": True}}
RECOMPUTE: dict[str, Any] = {"memory": {"activation_checkpointing": "full"}}

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48}
_NOISY_EXPERTS = {
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.01},
}


def built(kind: str, attention: str = ATTENTION_NAME, **fields: Any) -> torch.nn.Module:
    """A tiny model on meta, of an architecture that no other test uses."""
    config = CONFIG_MAPPING[kind](**{"vocab_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, **SMALL, **fields})
    return build_meta(config, dtype=torch.float32, attn_implementation=attention)


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        (
            ("gpt_bigcode", dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)),
            {**TP2, "optimizer": {"type": "Muon", "params": {"qk_clip": 100}}},
            r"qk_clip = 100.*one key/value head.*use parallel.tp 1",
        ),
        (
            ("llama", {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}),
            TP2,
            r"does not divide.*use 1",
        ),
        (("llama", {"intermediate_size": 49}), TP2, r"does not divide model.layers.0.mlp.gate_proj \(49\).*use 1"),
        (("llama", {"vocab_size": 97}), TP2, r"does not divide.*vocab_size \(97\).*use 1"),
        (("llama", {"num_hidden_layers": 1}), PP2, r"1 decoder layers.*use parallel.pp 1"),
        (
            ("llama", {"attention_dropout": 0.1}),
            {},
            r"model.config.attention_dropout = 0.1.*set \"attention_dropout\": 0.0",
        ),
        (
            ("phimoe", {"router_jitter_noise": 0.02, "input_jitter_noise": 0.03}),
            {},
            r"router_jitter_noise = 0.02.*two forward.*\"router_jitter_noise\": 0.0, \"input_jitter_noise\": 0.0",
        ),
        (("mixtral", {"router_jitter_noise": 0.1}), {}, r"router_jitter_noise = 0.1.*in training differ.*0.0 in model"),
        (
            ("dbrx", {"d_model": 32, "n_heads": 4, "n_layers": 2, **_NOISY_EXPERTS}),
            {},
            r"ffn_config.moe_jitter_eps = 0.01.*in training differ",
        ),
        (("mixtral", {"output_router_logits": True}), {}, r"depends on the layout.*moe.balance to aux_loss"),
    ],
)
def test_an_unsupported_layout_is_refused(
    model: tuple[str, dict[str, Any]], sections: dict[str, Any], message: str
) -> None:
    kind, fields = model
    made = meta_of(kind, **fields) if kind in CONFIGS else built(kind, **fields)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check_layout(resolved(world_size=2, **sections), made)


def test_zero_1_in_bf16_is_refused_for_a_pipeline_stage_without_experts() -> None:
    layout = {"engine": "deepspeed", "parallel": {"pp": 2, "ep": 2}, "bf16": {"enabled": True}}
    sparse = {"num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0, 1, 2]}
    half = built("qwen3_moe", **sparse)
    for stage, refusal in ((1, r"stage 0 has no experts.*\n.*use zero_optimization.stage 0"), (0, None)):
        run = resolved(world_size=4, zero_optimization={"stage": stage}, **layout)
        with pytest.raises(ConfigError, match=refusal) if refusal else contextlib.nullcontext():
            check_layout(run, half)


NARROW_VALUES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu", "axk1")


@pytest.mark.parametrize("kind", ["mistral", *sorted(ADAPTED), *NARROW_VALUES])
def test_ring_attention_takes_documents_windows_biases_and_values_that_are_narrower_than_keys(kind: str) -> None:
    model = family_meta(kind, v_head_dim=8) if kind in NARROW_VALUES else meta_of(kind)
    why = r"DeepseekV32Indexer selects keys of the whole sequence.*\n.*use ulysses"
    with pytest.raises(ConfigError, match=why) if kind == "deepseek_v32" else contextlib.nullcontext():
        check_layout(resolved(world_size=2, **RING, **MASKED), model)
    if kind == "deepseek_v32":
        check_layout(resolved(world_size=2, **CP2, **MASKED), model)


def test_the_trial_runs_the_method_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_merge", lambda *_: None)
    check_layout(resolved(world_size=2, **CP2), meta_of("llama"))
    with pytest.raises(ConfigError, match=r"(?s)cp_method = 'ring'.*ring attention gives other logits.*ulysses"):
        check_layout(resolved(world_size=2, **RING), meta_of("llama"))


@pytest.mark.parametrize("kind", ["flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"])
def test_sinks_and_soft_caps_are_part_of_our_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_layout(resolved(world_size=2, **RING, **MASKED), family_meta(kind))
    monkeypatch.setattr(own_attention, "score_rule", lambda **_: None)
    with pytest.raises(ConfigError, match=rf"(?s)our attention gives other logits .*tiny {kind}"):
        check_layout(resolved(world_size=2), family_meta(kind))


@pytest.mark.parametrize("kind", ["bloom", "gpt_oss", "llama4_text"])
def test_the_reference_masks_documents_that_transformers_does_not_mask(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"model_type": kind, "vocab_size": 64}
    run = resolved(world_size=1, engine="reference", model={"config": name}, **MASKED)
    assert own_attention.attention_of(run) == ATTENTION_NAME
    check_layout(run, meta_of(kind))
    monkeypatch.setattr(own_attention, "_WITHOUT_DOCUMENTS", ())
    with pytest.raises(ConfigError, match="mix positions by other means than attention"):
        check_layout(run, meta_of(kind, attention="sdpa"))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("deepseek_v4", "DeepseekV4Attention attends to keys that it compresses or selects itself"),
        ("doge", "DogeAttention makes a mask of its own from the values"),
        ("inkling_text", "InklingAttention adds a bias that it computes"),
        ("trocr", "TrOCRAttention computes its scores in its own code"),
    ],
)
def test_what_needs_eager_attention_is_refused_with_its_module_and_property(kind: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"our attention (fails|gives other logits).*: {why}.*\n.*eager"):
        check_layout(resolved(world_size=2), family_meta(kind))


def test_masks_that_an_architectures_own_code_does_not_make_are_refused_with_its_module() -> None:
    why = r"mask_documents = True\n.*other means than attention: LocalSelfAttention computes its scores in its own code"
    with pytest.raises(ConfigError, match=why):  # its code cannot compute a document alone
        check_layout(resolved(world_size=2, **MASKED), family_meta("reformer"))


BIDIRECTIONAL = r"(?s)sees the tokens to its right.*set model.config.is_decoder to true"


def test_whether_a_model_is_causal_is_tried_not_read_from_is_decoder() -> None:
    neox = built("gpt_neox")
    assert neox.config.is_decoder is False  # type: ignore[union-attr]  # transformers' default, for a decoder
    check_layout(resolved(world_size=2), neox)
    for attention in (ATTENTION_NAME, "eager"):
        model = {"config": {"model_type": "bert"}, "attn_implementation": "sdpa" if attention != "eager" else "eager"}
        with pytest.raises(ConfigError, match=BIDIRECTIONAL):
            check_layout(resolved(world_size=2, model=model), built("bert", attention=attention, **_NO_DROPOUT))
        check_layout(resolved(world_size=2, model=model), built("bert", attention, is_decoder=True, **_NO_DROPOUT))


def test_end_of_text_that_is_padding_too_may_not_hide_other_tokens() -> None:
    model = {"config": {"model_type": "xlm"}, "attn_implementation": "eager"}
    fields = {"causal": True, "emb_dim": 64, "n_heads": 4, "n_layers": 2, "dropout": 0.0, "attention_dropout": 0.0}
    for padding, refusal in ((0, "sees the tokens to its right"), (63, None)):
        config = CONFIG_MAPPING["xlm"](**fields, vocab_size=64, pad_token_id=padding, eos_token_id=0)
        xlm = build_meta(config, dtype=torch.float32, attn_implementation="eager")
        with pytest.raises(ConfigError, match=refusal) if refusal else contextlib.nullcontext():
            check_layout(resolved(world_size=2, model=model), xlm)


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_a_model_that_reads_another_stages_layer_is_refused_as_a_pipeline() -> None:
    config = CONFIG_MAPPING["rwkv"](vocab_size=64, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    model = build_meta(config, dtype=torch.float32, attn_implementation="eager")
    with pytest.raises(ConfigError, match=r"parallel.pp = 2\n.*fails on a tiny rwkv"):
        check_layout(resolved(world_size=2, **PP2), model)


def test_the_remedy_eager_names_what_eager_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "is_adapted", lambda _: False)
    with pytest.raises(ConfigError, match=r"use eager \(without data\.mask_documents"):
        built("gptj")
    monkeypatch.setattr(own_attention, "score_rule", lambda **_: None)
    with pytest.raises(ConfigError, match=r"use model\.attn_implementation eager and data\.mask_documents false"):
        check_layout(resolved(world_size=2, **MASKED), family_meta("gpt_oss"))


@pytest.mark.parametrize(
    "name", ["llama_tied", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]
)
def test_supported_combinations_are_accepted_quickly(name: str) -> None:
    began = time.process_time()
    every = {"parallel": {"pp": 2, "tp": 2, "cp": 2}, **CHUNK, **MASKED, **RECOMPUTE}
    check_layout(resolved(world_size=8, **every), meta_of(name))
    assert time.process_time() - began < 10  # under a second on an idle machine


@pytest.mark.parametrize("sections", [MASKED, CP2])
@pytest.mark.parametrize("kind", ["phi3_longrope", "phimoe"])
def test_what_depends_on_the_longest_position_of_a_forward_pass_is_found_by_its_logits(
    kind: str, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_layout(resolved(world_size=2, **sections), meta_of(kind))
    monkeypatch.setattr(decoder, "follow_sequence_lengths", lambda _model: None)
    with pytest.raises(ConfigError, match="mix positions by other means than attention"):
        check_layout(resolved(world_size=2, **sections), meta_of(kind))


CLIPPED: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"qk_clip": 100}}}
BOUNDED = {"qwen3", "qwen3_moe", "gemma3_text", "gemma2"}
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
    # an audio tower's attention has no number, and does not run (Phi-4 multimodal)
    layers = {
        getattr(model.get_submodule(each.name), "layer_idx", None): each for each in reversed(attention_heads(model))
    }
    return [
        (layers[layer].name, head, factor)
        for layer, own in logits.items()
        for head in range(len(own))
        for factor in (0.5, 64.0)
        if not scales_alone(model, layers[layer], head, factor, logits=own)
    ]


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - BOUNDED))
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
        ("bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 2}, r"bloom computes its scores in its own code"),
        ("deepseek_v32", ADAPTED["deepseek_v32"], r"deepseek_v32 selects the keys of every query by an indexer"),
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
        try:
            config = family_config(kind)
            text = refusal(config)
        except Exception:  # such a model cannot be built with this attention, whatever the optimizer
            continue
        if text is None:
            accepted.append(kind)
            found = heads_that_do_not_scale(config)
            wrong |= {kind: found} if found else {}
    assert wrong == {}
    assert len(accepted) >= LEAST_ACCEPTED, accepted
