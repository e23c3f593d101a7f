"""Activation checkpointing saves memory and does not change gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from pipeline.config.sections.run import MemorySection
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.activation_checkpointing import apply_activation_checkpointing
from pipeline.engines.parallel.assemble import assemble
from pipeline.engines.parallel.conditional_modules import conditional_blocks
from pipeline.engines.parallel.mesh import Mesh
from tests.engines.parallel.allocations import AllocationRecorder
from tests.engines.parallel.layouts import fill_weights, resolved
from tests.engines.parallel.ranks import WORLD, Ranks
from tests.models.architectures import assert_same, batch_of, gradients, meta_of, plain_decoder

MODES = {
    "none": MemorySection(),
    "full": MemorySection(activation_checkpointing="full"),
    "selective": MemorySection(activation_checkpointing="selective"),
    "every second": MemorySection(activation_checkpointing="full", every_n_layers=2),
}
SAVED_OPERATORS = ("mm", "_scaled_dot_product_flash_attention_for_cpu")
_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_key_value_heads": 2}
_DBRX = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
}


def passes(name: str, memory: MemorySection) -> tuple[int, dict[str, torch.Tensor], int]:
    """Bytes saved after the forward pass, gradients, and matrix products and attentions of the backward pass."""
    decoder, batch = plain_decoder(name), batch_of(borders=((4, 9), (12,)))
    apply_activation_checkpointing(decoder.causal, memory)
    decoder.train()
    with AllocationRecorder() as recorder:
        total = decoder(batch.input_ids, batch, CrossEntropy())[0]
        kept, before = recorder.alive_bytes, recorder.calls(*SAVED_OPERATORS)
        total.backward()
    return kept, gradients(decoder), recorder.calls(*SAVED_OPERATORS) - before


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("gpt2", marks=pytest.mark.sweep),
        "mixtral",
        pytest.param("gemma3_text", marks=pytest.mark.sweep),
    ],
)
def test_gradients_do_not_change(name: str) -> None:
    _, expected, _ = passes(name, MODES["none"])
    for memory in MODES.values():
        assert_same(passes(name, memory)[1], expected, tolerance=1e-6)


def test_more_recomputation_needs_less_memory() -> None:
    saved = {mode: passes("llama", memory)[0] for mode, memory in MODES.items()}
    assert saved["none"] > saved["every second"] > saved["full"]
    assert saved["none"] > saved["selective"] > saved["full"]


def test_selective_checkpointing_recomputes_no_matrix_product_and_no_attention() -> None:
    products = {mode: passes("llama", memory)[2] for mode, memory in MODES.items()}
    assert products["selective"] == products["none"] < products["every second"] < products["full"]


def kept_by_a_rank(_rank: int, mode: str) -> int:
    """Bytes that a tensor-parallel rank saves in a forward pass."""
    run = resolved(world_size=WORLD, parallel={"tp": WORLD}, memory={"activation_checkpointing": mode})
    model, mesh = meta_of("llama", num_key_value_heads=4), Mesh(run.topology, device_type="cpu")
    local, batch = assemble(run, model, mesh), batch_of(length=32)
    fill_weights(local, model)
    local.decoder.train()
    with AllocationRecorder() as recorder:
        total = local.decoder(batch.input_ids, batch, CrossEntropy())[0]
        kept = recorder.alive_bytes
        total.backward()
    return kept


def test_selective_checkpointing_keeps_less_than_none_under_tensor_parallelism(ranks: Ranks) -> None:
    # what all-gathers give is as large on every rank as without tensor parallelism
    none, selective = (max(ranks.run(kept_by_a_rank, mode)) for mode in ("none", "selective"))
    assert selective < 0.9 * none


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
