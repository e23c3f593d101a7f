"""The largest logits of key heads, in blocks, are those of all scores at once, of the pairs that attention sees."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.config.topology import sequence_chunks
from pipeline.models import attention_logits
from pipeline.models.attention_logits import LARGEST, LogitWatch, watch_of
from pipeline.models.masks import allowed_pairs

B, H, K, T, D = 2, 4, 2, 24, 8
SCALE = 0.3
WHOLE = (range(T),)


def drawn(heads: int, *, seed: int) -> Tensor:
    return torch.randn(B, heads, T, D, generator=torch.Generator().manual_seed(seed))


def documents() -> Tensor:
    return torch.tensor([[0] * 5 + [1] * 19, [0] * 11 + [1] * 2 + [2] * 11], dtype=torch.int32)


def of_all_scores(query: Tensor, key: Tensor, docs: Tensor | None, window: int | None, *, heads: int = K) -> Tensor:
    """By key heads, `heads` of them, from [B, H, T, T]."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * SCALE
    seen = allowed_pairs(docs, window, torch.arange(T), torch.arange(T))
    return scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3)).unflatten(0, (heads, -1)).amax(1)


def watch(docs: Tensor | None = None, window: int | None = None, *, heads: int = K) -> LogitWatch:
    return LogitWatch(torch.full((heads,), -torch.inf), docs, window, SCALE)


@pytest.fixture(params=[(256, 1 << 25), (5, 1), (7, B * H * 7 * 6)], ids=["one block", "columns", "blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, scores = request.param
    monkeypatch.setattr(attention_logits, "_ROWS", rows)
    monkeypatch.setattr(attention_logits, "_SCORES", scores)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("docs", [None, documents()], ids=["one document", "packed"])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_blocks_have_the_largest_of_all_scores(docs: Tensor | None, window: int | None) -> None:
    query, key, each = drawn(H, seed=1), drawn(K, seed=2), watch(docs, window)
    each.see(query, key, queries=WHOLE, keys=WHOLE)
    assert torch.allclose(each.largest, of_all_scores(query, key, docs, window), atol=1e-6)
    before = each.largest.clone()
    each.see(query * 0.5, key, queries=WHOLE, keys=WHOLE)  # a second micro-batch with smaller ones
    assert torch.equal(each.largest, before)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("window", [None, 6])
def test_chunks_of_ring_attention_have_the_largest_together(window: int | None) -> None:
    query, key, each = drawn(H, seed=1), drawn(K, seed=2), watch(documents(), window)
    chunks = [sequence_chunks(T, cp=2, cp_rank=rank, zigzag=True) for rank in range(2)]

    def part(of: Tensor, ranges: Sequence[range]) -> Tensor:
        return of[:, :, [position for chunk in ranges for position in chunk]]

    for queries in chunks:
        for keys in chunks:
            each.see(part(query, queries), part(key, keys), queries=queries, keys=keys)
    assert torch.allclose(each.largest, of_all_scores(query, key, documents(), window), atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_of_key_heads_count_for_the_head_that_they_copy(ranks: int) -> None:
    """Ulysses: a rank has some of the heads; one key head is copied for two ranks, two for four."""
    shared = ranks // 2
    query, key, each = drawn(H, seed=1), drawn(shared, seed=2), watch(heads=shared)
    copied = key.repeat_interleave(2, 1)
    for rank in range(ranks):
        own = slice(rank * H // ranks, (rank + 1) * H // ranks)
        each.see(query[:, own], copied[:, [rank]], queries=WHOLE, keys=WHOLE, first_head=rank, copies=2)
    assert torch.allclose(each.largest, of_all_scores(query, key, None, None, heads=shared), atol=1e-6)


def test_a_recomputation_watches_nothing_and_nor_does_an_evaluation() -> None:
    module, query, key = nn.Module(), drawn(H, seed=1).requires_grad_(), drawn(K, seed=2)
    setattr(module, LARGEST, torch.full((K,), -torch.inf))

    def layer(of: Tensor) -> Tensor:
        each = watch_of(module, None, None, scale=SCALE)
        if each is not None:
            each.see(of, key, queries=WHOLE, keys=WHOLE)
        return of.square()

    passed = checkpoint(layer, query, use_reentrant=False)
    assert torch.allclose(module.largest_logits, of_all_scores(query.detach(), key, None, None), atol=1e-6)
    module.largest_logits.fill_(-torch.inf)  # type: ignore[operator]
    passed.sum().backward()
    assert query.grad is not None
    with torch.no_grad():
        layer(query)
    module.eval()
    layer(query)
    assert module.largest_logits.isneginf().all()  # type: ignore[operator]


def test_a_product_that_overflows_fp16_is_finite() -> None:
    query, key, each = drawn(H, seed=1).half() * 1000, drawn(K, seed=2).half() * 1000, watch()
    each.see(query, key, queries=WHOLE, keys=WHOLE)
    assert torch.equal(each.largest, torch.full((K,), torch.finfo(torch.float16).max))
