"""Context parallelism (Ulysses, ring attention) gives the loss and every gradient of the full sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.parallel.kernels import attention_backward, attention_forward, math_backward, math_forward
from tests.parallel.ranks import Ranks
from tests.parallel.test_tensor import compare

# the first document of sample 0 ends inside the first shard, another crosses a shard boundary, one is a single token
BORDERS = ((3, 7, 8, 19, 24), (13,))


@pytest.mark.parametrize("borders", [None, BORDERS], ids=["one-document", "documents"])
@pytest.mark.parametrize("name", ["llama", "llama_one_kv_head", "mistral", "gemma3_text", "gpt2"])
def test_ulysses_on_four_ranks_equals_the_full_sequence(ranks: Ranks, name: str, borders: Any) -> None:
    # two key/value heads, or one, for four ranks
    compare(ranks, name, {"parallel": {"cp": 4}}, borders)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_ulysses_on_two_ranks_equals_the_full_sequence(ranks: Ranks, name: str) -> None:
    compare(ranks, name, {"parallel": {"cp": 2}})


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_ulysses_with_tensor_parallelism_equals_the_full_model(ranks: Ranks, name: str) -> None:
    compare(ranks, name, {"parallel": {"cp": 2, "tp": 2}, "loss": {"chunk": 5}}, BORDERS)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama_one_kv_head", "qwen3"])
def test_ring_attention_equals_the_full_sequence(ranks: Ranks, name: str, cp: int) -> None:
    compare(ranks, name, {"parallel": {"cp": cp, "cp_method": "ring"}})


def test_ring_attention_supports_more_ranks_than_heads(ranks: Ranks) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    compare(ranks, "llama", {"parallel": {"cp": 4, "cp_method": "ring"}}, None, **heads)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_context_parallelism_works_with_activation_checkpointing(ranks: Ranks, method: str, mode: str) -> None:
    compare(ranks, "llama", {"parallel": {"cp": 4, "cp_method": method}, "memory": {"activation_checkpointing": mode}})


@pytest.mark.parametrize("causal", [True, False])
def test_the_math_implementation_equals_the_flash_kernels(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(2, 3, 7, 8, generator=generator) for _ in range(4))
    options: dict[str, Any] = {"scale": 0.4, "causal": causal}
    for kernel, formula in zip(
        attention_forward(query, key, value, **options), math_forward(query, key, value, **options), strict=True
    ):
        assert torch.allclose(kernel, formula, atol=1e-5)
    forward_outputs = attention_forward(query, key, value, **options)
    for kernel, formula in zip(
        attention_backward(grad, query, key, value, *forward_outputs, **options),
        math_backward(grad, query, key, value, *forward_outputs, **options),
        strict=True,
    ):
        assert torch.allclose(kernel, formula, atol=1e-5)


def test_the_gpu_kernels_accept_their_arguments() -> None:
    # on meta: the operators' own checks of shapes and arguments, without a GPU
    query, key, value, grad = (torch.empty(2, 3, 7, 8, dtype=torch.bfloat16, device="meta") for _ in range(4))
    out, log_sum = attention_forward(query, key, value, scale=0.4, causal=True)
    assert (out.shape, log_sum.shape, log_sum.dtype) == (query.shape, (2, 3, 7), torch.float32)
    parts = attention_backward(grad, query, key, value, out, log_sum, scale=0.4, causal=False)
    assert [part.shape for part in parts] == [query.shape] * 3
