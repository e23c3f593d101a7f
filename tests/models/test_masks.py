"""Masks of documents and sliding windows: FlexAttention's table of blocks allows what the dense mask allows."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from pipeline.engines.parallel import kernels
from pipeline.engines.parallel.kernels import attention_forward
from pipeline.models.attention import (
    AttentionContext,
    _compiled_flex_attention,
    attend,
    attention_windows,
    make_context,
)
from pipeline.models.attention_scores import ScoreRule
from pipeline.models.masks import (
    BLOCK,
    CAUSAL,
    FULL,
    AttentionMask,
    Chunks,
    allowed_pairs,
    make_mask,
    make_part_mask,
    split_span,
)
from tests.models.architectures import config_of

CPU = torch.device("cpu")
Case = tuple[int, int | None, list[list[int]] | None]
MASKS = st.tuples(
    st.integers(1, 5 * BLOCK + 7),
    st.none() | st.integers(1, 4 * BLOCK),
    st.none() | st.lists(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=8), min_size=1, max_size=2),
)
"""Positions, window, and the lengths of the documents of every sample."""


def documents_of(lengths: list[list[int]], total: int) -> Tensor:
    """[B, S]: each sample filled up with its documents, the last one as long as needed."""
    rows = []
    for each in lengths:
        numbers = torch.arange(len(each)).repeat_interleave(torch.tensor(each))[:total]
        rows.append(torch.cat([numbers, torch.full((total - len(numbers),), len(each))]).int())
    return torch.stack(rows)


def both(total: int, window: int | None, documents: Tensor | None) -> tuple[AttentionMask, AttentionMask]:
    common = {"length": total, "dtype": torch.float32, "device": CPU}
    return tuple(make_mask(documents, window, **common, blocks=blocks) for blocks in (False, True))  # type: ignore[arg-type, return-value]


@settings(max_examples=40, deadline=None)
@given(MASKS)
def test_the_blocks_allow_what_the_dense_mask_allows(case: tuple[int, int | None, list[list[int]] | None]) -> None:
    total, window, lengths = case
    documents = None if lengths is None else documents_of(lengths, total)
    dense, flex = both(total, window, documents)
    if dense.causal_only:
        assert flex is dense is CAUSAL
        return
    assert dense.additive is not None
    blocks, rule = flex.blocks, flex.blocks.mask_mod
    allowed = dense.additive == 0
    listed = torch.zeros(allowed.shape[0], 1, *blocks.to_dense().shape[-2:])
    for sample in range(allowed.shape[0]):
        for row in range(listed.shape[2]):
            for numbers, chosen, whole in (
                (blocks.kv_num_blocks, blocks.kv_indices, False),
                (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
            ):
                for column in chosen[sample, 0, row, : int(numbers[sample, 0, row])].tolist():
                    listed[sample, 0, row, column] += 1
                    tile = allowed[sample, 0, row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
                    assert tile.all() if whole else tile.any()  # nothing is computed in vain
    assert listed.max() <= 1
    tiles = listed.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., :total, :total]
    assert not (allowed & (tiles == 0)).any()
    at = torch.arange(total)
    by_rule = torch.stack(
        [rule(torch.tensor(b), torch.tensor(0), at[:, None], at[None]) for b in range(allowed.shape[0])]
    )
    assert torch.equal(by_rule[:, None], allowed)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.none() | st.integers(1, 500), MASKS.map(lambda case: case[2]), st.integers(0, 3))
def test_the_mask_of_a_part_is_that_part_of_the_whole_mask(
    size: int, window: int | None, lengths: list[list[int]] | None, rank: int
) -> None:
    # queries in two chunks, as of a rank of ring attention, keys in one
    total, documents = 8 * size, None if lengths is None else documents_of(lengths, 8 * size)
    chunks = [range(number * size, (number + 1) * size) for number in range(8)]
    queries, keys = (chunks[rank], chunks[7 - rank]), (chunks[2],)
    whole = allowed_pairs(documents, window, torch.arange(total), torch.arange(total))
    rows, columns = (torch.tensor([at for chunk in each for at in chunk]) for each in (queries, keys))
    expected = whole[:, :, rows][..., columns]
    parts: dict[str, Any] = {"queries": queries, "keys": keys, "dtype": torch.float32, "device": CPU}
    dense, flex = (make_part_mask(documents, window, **parts, blocks=blocks) for blocks in (False, True))
    if not expected.any():
        assert dense is None
        return
    if expected.all():
        assert dense is FULL
    else:
        assert dense.additive is not None
        assert torch.equal(dense.additive == 0, expected)
    assert flex.blocks is not None
    blocks = flex.blocks
    tiles = blocks.to_dense().repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., : 2 * size, :size]
    assert not (expected & (tiles == 0)).any()
    for sample in range(expected.shape[0]):
        by_rule = blocks.mask_mod(
            torch.tensor(sample), torch.tensor(0), torch.arange(2 * size)[:, None], torch.arange(size)[None]
        )
        assert torch.equal(by_rule, expected[sample, 0])
        for row in range(blocks.full_kv_num_blocks.shape[2]):
            for column in blocks.full_kv_indices[
                sample, 0, row, : int(blocks.full_kv_num_blocks[sample, 0, row])
            ].tolist():
                tile = expected[sample, 0, row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
                assert tile.all()
                assert tile.shape[1] == BLOCK


def test_flex_attention_gives_the_output_and_log_sum_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels, "compiled_flex_attention", lambda *_: flex_attention
    )  # compiled, a CPU has no log-sum-exp
    documents = documents_of([[100, 90, 300]], 512)
    parts: dict[str, Any] = {"queries": (range(128, 320),), "keys": (range(64, 200),), "device": CPU}
    masks = [make_part_mask(documents, 80, **parts, dtype=torch.float32, blocks=blocks) for blocks in (False, True)]
    query, key, value = (torch.randn(1, heads, n, 16) for heads, n in ((4, 192), (2, 136), (2, 136)))
    found, expected = [], []
    for mask, into in zip(masks, (expected, found), strict=True):
        assert mask is not None
        into.extend(attention_forward(query, key, value, scale=0.25, mask=mask))
    assert (expected[1] == -torch.inf).any()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_flex_attention_is_compiled_for_every_length_and_mode_and_never_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs: list[object] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    _compiled_flex_attention.cache_clear()

    def run(length: int, window: int, *, gradients: bool, rule: ScoreRule | None = None) -> None:
        mask = make_mask(None, window, length=length, dtype=torch.float32, device=CPU, blocks=True)
        query, key, value = (torch.randn(1, 2, length, 16, requires_grad=gradients) for _ in range(3))
        with torch.set_grad_enabled(gradients):
            attend(query, key, value, scale=1.0, mask=mask, rule=rule)

    # dynamo's limit is 8; ring attention over documents with two kinds of windows needs 12
    with torch._dynamo.config.patch(recompile_limit=1):
        for length, gradients in itertools.product((160, 320), (False, True)):
            run(length, 100, gradients=gradients)
        assert len(graphs) == 4
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            run(160, 50, gradients=False)
    for _step in range(3):  # a rule's function is new in each forward pass: one graph, with the bias as an input
        run(192, 100, gradients=True, rule=ScoreRule(softcap=2.0, bias=torch.randn(1, 2, 192)))
    assert len(graphs) == 5
    _compiled_flex_attention.cache_clear()


@pytest.mark.parametrize(
    ("window", "lengths"), [(None, [[100, 28, 200], [300, 1]]), (50, None), (150, [[90, 170], [1, 400]])]
)
def test_flex_attention_has_the_output_of_the_dense_mask(window: int | None, lengths: list[list[int]] | None) -> None:
    total = 3 * BLOCK - 5
    documents = None if lengths is None else documents_of(lengths, total)
    dense, flex = both(total, window, documents)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, total, 16, generator=generator) for heads in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=dense.additive, scale=0.25
    )
    found = flex_attention(query, key, value, block_mask=flex.blocks, scale=0.25, enable_gqa=True)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("documents", [None, documents_of([[5, 19], [24]], 24)], ids=["one-document", "documents"])
def test_chunks_begin_anew_in_every_document(documents: Tensor | None) -> None:
    split, window = split_span(documents, Chunks(7), length=24, device=CPU)
    masks = [
        make_mask(split, window, length=24, dtype=torch.float32, device=CPU, blocks=each) for each in (False, True)
    ]
    query, key, value = (torch.randn(2, 2, 24, 8) for _ in range(3))
    expected = attend(query, key, value, scale=0.4, mask=masks[0])
    torch.testing.assert_close(flex_attention(query, key, value, scale=0.4, block_mask=masks[1].blocks), expected)
    assert masks[0].additive is not None
    for sample, allowed in enumerate((masks[0].additive == 0).expand(2, 1, 24, 24)[:, 0]):
        begins = [0, 7, 14, 21] if documents is None or sample == 1 else [0, 5, 12, 19]
        chunk = [max(b for b in begins if b <= at) for at in range(24)]
        assert allowed.tolist() == [[k <= q and chunk[k] == chunk[q] for k in range(24)] for q in range(24)]
    assert split_span(None, Chunks(24), length=24, device=CPU) == (None, None)
    assert split_span(None, 5, length=24, device=CPU) == (None, 5)


def test_masks_are_made_once_for_the_windows_of_the_layers() -> None:
    windows = attention_windows(config_of("gemma3_text"))
    assert windows == {7, None}
    context = make_context(windows, length=24, dtype=torch.float32, device=CPU)
    assert context.masks[None] is CAUSAL
    assert isinstance(context, AttentionContext)
    query = torch.zeros(1, 1, 24, 8)
    assert context.mask(7, query) is context.masks[7]
    assert context.mask(5, query).additive is not None  # a window that the config does not tell


def test_an_attention_of_64k_positions_with_documents_makes_nothing_of_size_s_by_s() -> None:
    """Counted, not timed: no tensor of the mask has more than n^2 elements."""
    total = 64 * 1024
    made: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            made.extend(each.numel() for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, Tensor))
            return out

    documents = documents_of([[1000] * 60], total)
    with Sizes():
        make_mask(documents, 4096, length=total, dtype=torch.bfloat16, device=CPU, blocks=True)
    assert max(made) <= (total // BLOCK + 1) ** 2
