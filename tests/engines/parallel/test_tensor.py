"""Tensor parallelism with sequence parallelism gives the loss and every gradient of the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.parallel.layouts import full_model_gradients, layout_gradients
from tests.engines.parallel.ranks import Ranks
from tests.models.architectures import assert_same

ARCHITECTURES = [
    *("llama", "llama_tied", "llama_biases", "llama_padding", "qwen3", "mistral", "gemma", "gemma3_text"),
    *("phi", "gpt_neox", "starcoder2"),
    # their experts stay whole
    *("mixtral", "qwen3_moe", "qwen2_moe"),
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_tensor_parallel_ranks_equal_the_unsharded_model(ranks: Ranks, name: str) -> None:
    compare(ranks, name, {"parallel": {"tp": 2}})


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gemma3_text"])
def test_four_tensor_parallel_ranks_equal_the_unsharded_model(ranks: Ranks, name: str) -> None:
    compare(ranks, name, {"parallel": {"tp": 4}}, num_key_value_heads=4)


def test_vocabulary_parallel_cross_entropy_works_with_a_chunked_loss(ranks: Ranks) -> None:
    compare(ranks, "llama_tied", {"parallel": {"tp": 2}, "loss": {"chunk": 5}})


def compare(ranks: Ranks, name: str, sections: dict[str, Any], borders: Any = None, **fields: Any) -> None:
    loss, gradients = full_model_gradients(name, borders, **fields)
    for found, theirs in ranks.run(layout_gradients, name, sections, borders, fields):
        assert found == pytest.approx(loss, rel=1e-5)
        assert_same(theirs, gradients, tolerance=2e-5)
