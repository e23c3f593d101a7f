"""FLOPs of layers that are not full attention: windows count with their length, recurrent layers with their state."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from pipeline.engines.parallel.costs import forward_flops
from pipeline.models.construction.meta import build_meta
from pipeline.models.count import measure
from pipeline.models.layers import state_flops
from pipeline.plan.predict.closed_form_step import CLOSED
from pipeline.plan.predict.plan import typical_time
from pipeline.plan.predict.planned_run import open_run
from pipeline.runtime.machines.known import load_machine
from tests.conftest import ROOT
from tests.models.architectures import config_of, family_meta, meta_of

_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}


def _flops(config: object, length: int) -> float:
    model = build_meta(config, dtype=torch.float32, attn_implementation="sdpa")  # type: ignore[arg-type]
    found = measure(model, config, sequence_length=length).flops_per_token  # type: ignore[arg-type]
    assert found is not None
    return found


def test_mfu_counts_a_window_by_its_length_and_not_by_that_of_the_sequence() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = AutoConfig.for_model(
        "gemma3_text",
        **_SIZES,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        sliding_window=128,
        layer_types=kinds,
    )
    assert _flops(config, 4096) - _flops(config, 2048) == 12 * 64 * 2048  # one layer of four
    assert _flops(config, 128) - _flops(config, 64) == 4 * 12 * 64 * 64  # the window is longer


@pytest.mark.parametrize(
    ("kind", "keys", "elements"),
    [
        (
            "qwen3_next",
            {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
            4 * 8 * 16,
        ),
        ("bamba", {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32}, 8 * 16 * 32),
        ("jamba", {"mamba_expand": 2, "mamba_d_state": 16}, 64 * 2 * 16),
        ("kimi_linear", {"linear_num_heads": 4, "linear_head_dim": 8}, 4 * 8 * 8),
        ("minimax", {"head_dim": 16}, 4 * 16 * 16),
        ("recurrent_gemma", {"lru_width": 80}, 80),
    ],
)
def test_a_recurrent_layer_costs_six_flops_per_element_of_its_state(
    kind: str, keys: dict[str, int], elements: int
) -> None:
    config = AutoConfig.for_model(kind, **_SIZES, **keys)
    assert "linear_attention" in config.layer_types
    assert state_flops(config) == [6 * elements * (each == "linear_attention") for each in config.layer_types]


def test_gpt_oss_counts_windows_sinks_and_chosen_experts() -> None:
    """Hidden size 32, 4 heads of 8, 2 of keys, 2 of 4 experts of 48, a window of 7 on the first and the third layer."""
    products = 2 * 32 * 32 + 2 * 16 * 32 + 4 * 32 + 2 * (32 * 96 + 48 * 32)
    vectors = 4 + (32 + 16 + 16 + 32 + 4) + 2 * (96 + 32) + 2 * 32  # sinks; biases; those of experts; norms
    window, full = 4 * 32 * 7, 4 * 32 * 64
    layers, head = forward_flops(meta_of("gpt_oss"), sequence_length=64)
    assert layers == [2 * (products + vectors) + each for each in (window, full, window)]
    assert head == 2 * 96 * 32


def test_latent_attention_shared_experts_and_tokens_ahead_are_counted_by_their_matrices() -> None:
    """DeepSeek-V3 of hidden size 32: ranks 16, 4 heads with keys of 8 + 8 and values of 8, 2 of 4 experts and a shared
    one of 24, one module for multi-token prediction, which is a copy of the last layer with the head."""
    latent = 16 * 32 + 64 * 16 + 24 * 32 + 64 * 16 + 32 * 32
    expert = 3 * 24 * 32
    sparse = 2 * (latent + (2 + 1) * expert + 4 * 32 + 16 + 16 + 2 * 32)  # router and norms
    scores = 2 * 64 * 4 * (8 + 8) + 2 * 64 * 4 * 8
    whole = meta_of("deepseek_v3")
    layers, head = forward_flops(whole, sequence_length=64)
    assert layers[1:] == [sparse + scores] * 2
    ahead = build_meta(config_of("deepseek_v3"), dtype=torch.float32, attn_implementation="sdpa", ahead=1)
    same, more = forward_flops(ahead, sequence_length=64)
    assert same == layers
    assert more - head == sparse + scores + head + 2 * (2 * 32 * 32 + 3 * 32)  # its projection and three norms
    counted = [measure(each, each.config, sequence_length=64).flops_per_token or 0.0 for each in (ahead, whole)]
    assert counted[0] - counted[1] == pytest.approx(3 * (more - head), rel=0.01)


def test_a_hybrid_computes_less_on_long_sequences_than_a_model_of_full_attention_alone() -> None:
    """Qwen3-Next 80B-A3B, 65,536 tokens, on 64 H100s: attention of 12 layers instead of 48."""
    seconds, path = [], str(ROOT / "ds_configs" / "qwen3_moe_30b.json")
    for kinds in (["linear_attention"] * 3 + ["full_attention"]) * 12, ["full_attention"] * 48:
        model = f"model.config={json.dumps({'model_type': 'qwen3_next', 'layer_types': kinds})}"
        keys = (model, "parallel.ep=64", "data.sequence_length=65536", "train_batch_size=64")
        of = open_run(path, keys, load_machine("h100"), nodes=None, processes=64)
        seconds.append(typical_time(of.run, of.costs, of.machine, model=CLOSED).products)
    assert seconds[0] < 0.4 * seconds[1]


def test_a_plans_layers_and_mfu_both_count_the_state() -> None:
    model = family_meta("nemotron_h")
    state = sum(state_flops(model.config))  # type: ignore[arg-type]
    layers, head = forward_flops(model, sequence_length=0)
    whole = measure(model, model.config, sequence_length=0).flops_per_token  # type: ignore[arg-type]
    assert state > 0
    assert whole == pytest.approx(3 * (sum(layers) + head), rel=0.02)  # norms are parameters beside matrices
