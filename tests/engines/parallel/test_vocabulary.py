"""Vocabulary-parallel cross-entropy equals torch's up to rounding, and allocates one tensor of the logits' size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipeline.data.micro_batch import IGNORE
from pipeline.engines.parallel.vocabulary import FULL_VOCABULARY, VocabularyShard, cross_entropy
from tests.engines.parallel.allocations import AllocationRecorder
from tests.engines.parallel.layouts import full_model_gradients, layout_gradients
from tests.engines.parallel.ranks import Ranks, group_of
from tests.models.architectures import assert_same

V, ROWS, Z = 64, 10, 0.01
ARCHITECTURES = [
    *("llama", "llama_tied", "llama_biases", "llama_padding", "qwen3", "mistral", "gemma", "gemma3_text"),
    *("phi", "gpt_neox", "starcoder2"),
    # their experts stay whole
    *("mixtral", "qwen3_moe", "qwen2_moe"),
]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits [2, ROWS, V] and labels, all below 20, so that ranks with the last columns have no target."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, ROWS, V, generator=generator) * 6).to(dtype)
    labels = torch.randint(20, (2, ROWS), generator=generator)
    labels[0, 2] = labels[1, :4] = IGNORE
    return logits, labels


def expected(logits: Tensor, labels: Tensor) -> tuple[float, float, Tensor]:
    """Both sums computed by torch, and the gradient of cross-entropy + Z x squares."""
    leaf = logits.detach().double().requires_grad_()
    flat, targets = leaf.flatten(0, -2), labels.flatten()
    nats = F.cross_entropy(flat, targets, ignore_index=IGNORE, reduction="sum")
    squares = (torch.logsumexp(flat, -1)[targets != IGNORE] ** 2).sum()
    (nats + Z * squares).backward()
    assert leaf.grad is not None
    return float(nats.detach()), float(squares.detach()), leaf.grad


def sharded(rank: int, size: int) -> tuple[float, float, Tensor]:
    """Both sums and the gradient of this rank's columns."""
    group = group_of(rank, size)
    logits, labels = inputs()
    width = V // size
    first = width * (dist.get_rank(group) if group else 0)
    leaf = logits[..., first : first + width].clone().requires_grad_()
    nats, squares = cross_entropy(leaf, labels, VocabularyShard(group, first) if group else FULL_VOCABULARY)
    (nats + Z * squares).backward()
    assert leaf.grad is not None
    return float(nats.detach()), float(squares.detach()), leaf.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_and_gradient_equal_torchs_for_any_number_of_vocabulary_shards(ranks: Ranks, size: int) -> None:
    nats, squares, gradient = expected(*inputs())
    found = ranks.run(sharded, size)
    for their_nats, their_squares, _ in found:
        assert their_nats == pytest.approx(nats, rel=1e-6)
        assert their_squares == pytest.approx(squares, rel=1e-6)
    full = torch.cat([part for _, _, part in found[:size]], -1)
    assert torch.allclose(full.double(), gradient, rtol=1e-5, atol=1e-6)


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits, labels = inputs(torch.bfloat16)
    nats, squares, gradient = expected(logits, labels)
    leaf = logits.clone().requires_grad_()
    found = cross_entropy(leaf, labels)
    assert float(found[0].detach()) == pytest.approx(nats, rel=1e-6)
    assert float(found[1].detach()) == pytest.approx(squares, rel=1e-6)
    (found[0] + Z * found[1]).backward()
    assert torch.equal(leaf.grad, gradient.to(torch.bfloat16)) or torch.allclose(
        leaf.grad.double(), gradient, rtol=2**-8, atol=1e-6
    )


def test_a_batch_without_targets_has_zero_loss_and_gradient() -> None:
    logits, labels = inputs()
    leaf = logits.clone().requires_grad_()
    nats, squares = cross_entropy(leaf, torch.full_like(labels, IGNORE))
    (nats + squares).backward()
    assert (float(nats.detach()), float(squares.detach())) == (0.0, 0.0)
    assert not leaf.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_one_fp32_tensor_of_the_logits_size_is_allocated(dtype: torch.dtype) -> None:
    logits, labels = inputs(dtype)
    leaf = logits.clone().requires_grad_()
    with AllocationRecorder() as recorder:
        sum(cross_entropy(leaf, labels)).backward()  # type: ignore[union-attr]
    assert recorder.allocations(torch.float32, at_least=logits.numel()) == 1


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
