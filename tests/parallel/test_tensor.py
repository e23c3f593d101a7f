"""Tensor with sequence parallelism is the uncut model: the loss and every gradient. What cannot be cut is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.architectures import assert_same
from tests.parallel.layouts import full_model_gradients, layout_gradients
from tests.parallel.ranks import Ranks

CUT = [
    *("llama", "llama_tied", "llama_biases", "llama_padding", "qwen3", "mistral", "gemma", "gemma3_text"),
    *("phi", "gpt_neox", "starcoder2"),
]


@pytest.mark.parametrize("name", CUT)
def test_two_ranks_that_share_every_layer_are_the_uncut_model(ranks: Ranks, name: str) -> None:
    compare(ranks, name, {"parallel": {"tp": 2}})


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gemma3_text"])
def test_four_ranks_that_share_every_layer_are_the_uncut_model(ranks: Ranks, name: str) -> None:
    compare(ranks, name, {"parallel": {"tp": 4}}, num_key_value_heads=4)


def test_a_cut_vocabulary_is_scored_in_pieces_too(ranks: Ranks) -> None:
    compare(ranks, "llama_tied", {"parallel": {"tp": 2}, "loss": {"chunk": 5}})


def compare(ranks: Ranks, name: str, sections: dict[str, Any], borders: Any = None, **fields: Any) -> None:
    loss, gradients = full_model_gradients(name, borders, **fields)
    for found, theirs in ranks.run(layout_gradients, name, sections, borders, fields):
        assert found == pytest.approx(loss, rel=1e-5)
        assert_same(theirs, gradients, tolerance=2e-5)
