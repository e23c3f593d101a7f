"""FLOPs of layers that are not full attention: windows count with their length, recurrent layers with their state."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from pipeline.engines.parallel.costs import forward_flops
from pipeline.models.construction.meta import build_meta
from pipeline.models.count import measure
from pipeline.models.layers import state_flops
from tests.models.architectures import family_meta

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
    ],
)
def test_a_recurrent_layer_costs_six_flops_per_element_of_its_state(
    kind: str, keys: dict[str, int], elements: int
) -> None:
    config = AutoConfig.for_model(kind, **_SIZES, **keys)
    assert "linear_attention" in config.layer_types
    assert state_flops(config) == [6 * elements * (each == "linear_attention") for each in config.layer_types]


def test_a_plans_layers_and_mfu_both_count_the_state() -> None:
    model = family_meta("nemotron_h")
    state = sum(state_flops(model.config))  # type: ignore[arg-type]
    layers, head = forward_flops(model, sequence_length=0)
    whole = measure(model, model.config, sequence_length=0).flops_per_token  # type: ignore[arg-type]
    assert state > 0
    assert whole == pytest.approx(3 * (sum(layers) + head), rel=0.02)  # norms are parameters beside matrices
