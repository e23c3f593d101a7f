"""Activation checkpointing saves memory and does not change gradients."""

from __future__ import annotations

import pytest
import torch

from pipeline.config.sections.run import MemorySection
from pipeline.engines.objective import CrossEntropy
from pipeline.engines.parallel.activation_checkpointing import apply_activation_checkpointing
from tests.engines.parallel.allocations import AllocationRecorder
from tests.models.architectures import assert_same, batch_of, gradients, plain_decoder

MODES = {
    "none": MemorySection(),
    "full": MemorySection(activation_checkpointing="full"),
    "selective": MemorySection(activation_checkpointing="selective"),
    "every second": MemorySection(activation_checkpointing="full", every_n_layers=2),
}


SAVED_OPERATORS = ("mm", "_scaled_dot_product_flash_attention_for_cpu")


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


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma3_text"])
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
