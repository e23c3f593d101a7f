"""Context parallelism (Ulysses, ring attention) gives the loss and every gradient of the full sequence."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.topology import sequence_chunks
from pipeline.engines.parallel.kernels import (
    attention_backward,
    attention_forward,
    math_backward,
    math_forward,
    merged_backward,
)
from pipeline.engines.parallel.ring import RingAttention
from pipeline.models.attention import attend, repeat_heads
from pipeline.models.masks import CAUSAL, FULL, AttentionMask, make_mask
from tests.engines.parallel.ranks import Ranks, group_of
from tests.engines.parallel.test_vocabulary import compare
from tests.models.architectures import batch_of

# the first document of sample 0 ends inside the first shard, another crosses a shard boundary, one is a single token
BORDERS = ((3, 7, 8, 19, 24), (13,))


@pytest.mark.parametrize(
    ("name", "cp", "borders"),
    [
        # two key/value heads, or one, for four ranks
        *product(["llama", "llama_one_kv_head", "mistral", "gemma3_text", "gpt2"], [4], [None, BORDERS]),
        ("llama", 2, None),
        ("qwen3_moe", 2, None),
        ("gemma2", 2, BORDERS),
        ("gpt_oss", 4, BORDERS),
        ("gpt_neo", 2, BORDERS),
        ("bloom", 4, BORDERS),
        ("deepseek_v32", 2, BORDERS),
    ],
)
def test_ulysses_equals_the_full_sequence(ranks: Ranks, name: str, cp: int, borders: Any) -> None:
    compare(ranks, name, {"parallel": {"cp": cp}}, borders)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_ulysses_with_tensor_parallelism_equals_the_full_model(ranks: Ranks, name: str) -> None:
    compare(ranks, name, {"parallel": {"cp": 2, "tp": 2}, "loss": {"chunk": 5}}, BORDERS)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "gptj", "bloom", "mpt", "llama4_text"])
def test_ring_attention_has_every_kind_of_attention(ranks: Ranks, name: str) -> None:
    compare(ranks, name, {"parallel": {"cp": 2, "cp_method": "ring"}}, BORDERS)


@pytest.mark.integration
@pytest.mark.parametrize("borders", [None, BORDERS], ids=["one-document", "documents"])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama_one_kv_head", "qwen3", "mistral", "gemma3_text", "deepseek_v3"])
def test_ring_attention_equals_the_full_sequence(ranks: Ranks, name: str, cp: int, borders: Any) -> None:
    # mistral and gemma3_text have sliding windows, deepseek_v3 values that are narrower than keys
    compare(ranks, name, {"parallel": {"cp": cp, "cp_method": "ring"}}, borders)


def errors_by_pointer(rank: int, cp: int, borders: Any) -> list[float]:
    """Relative errors of ring attention's dq, dk and dv where kernels read log-sum-exps as CUDA's do: by pointer."""
    length, scale, aten = 64, 0.3, torch.ops.aten

    class AsOnCuda(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
                # flash_api.cpp, mha_bwd: softmax_lse.data_ptr(), as [B, H, T] without gaps
                log_sum, rows = args[5], torch.empty(args[5].shape).stride()
                args = (*args[:5], log_sum.as_strided(log_sum.shape, rows, log_sum.storage_offset()), *args[6:])
            found = func(*args, **(kwargs or {}))
            # CUDA's forward pass gives them without gaps, the CPU's as [B, T, H]
            forward = func is aten._scaled_dot_product_flash_attention_for_cpu.default
            return (found[0], found[1].contiguous()) if forward else found

    query, key, value, grad = whole = drawn(heads=(4, 2, 2, 4), length=length)
    documents = batch_of(length=length, borders=borders).documents
    options: dict[str, Any] = {"length": length, "dtype": torch.float32, "device": torch.device("cpu")}
    for each in whole[:3]:
        each.requires_grad_()
    attend(query, key, value, scale=scale, mask=make_mask(documents, None, **options)).backward(grad)
    own = torch.tensor([p for part in sequence_chunks(length, cp=cp, cp_rank=rank % cp, zigzag=True) for p in part])
    group = group_of(rank, cp)
    assert group is not None
    ring, parts = RingAttention(group), [each.detach()[:, :, own].requires_grad_() for each in whole[:3]]
    with AsOnCuda():
        attended = ring.attend(*parts, scale=scale, mask=ring.make_mask(documents, None, **options))
        attended.backward(grad[:, :, own])
    return [
        float((part.grad - each.grad[:, :, own]).norm() / each.grad[:, :, own].norm())  # type: ignore[operator, index]
        for part, each in zip(parts, whole, strict=False)
    ]


@pytest.mark.parametrize("borders", [None, ((3, 7, 8, 40), (29,))], ids=["one-document", "documents"])
@pytest.mark.parametrize("cp", [2, 4])
def test_gradients_of_ring_attention_hold_where_kernels_take_log_sums_by_pointer(
    ranks: Ranks, cp: int, borders: Any
) -> None:
    assert max(each for errors in ranks.run(errors_by_pointer, cp, borders) for each in errors) < 1e-5


def test_ring_attention_with_tensor_parallelism_equals_the_full_model(ranks: Ranks) -> None:
    compare(ranks, "gemma3_text", {"parallel": {"cp": 2, "cp_method": "ring", "tp": 2}, "loss": {"chunk": 5}}, BORDERS)


# documents of 3, 4, 1, 11, 5 and of 13 and 11 tokens, where longrope's threshold is 10
@pytest.mark.parametrize("borders", [None, BORDERS], ids=["one-document", "documents"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("name", ["phi3_longrope", "phimoe"])
def test_longrope_takes_the_factors_of_the_whole_sequence(ranks: Ranks, name: str, method: str, borders: Any) -> None:
    compare(ranks, name, {"parallel": {"cp": 2, "cp_method": method}}, borders)


def test_ring_attention_supports_more_ranks_than_heads(ranks: Ranks) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    compare(ranks, "llama", {"parallel": {"cp": 4, "cp_method": "ring"}}, None, **heads)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_context_parallelism_works_with_activation_checkpointing(ranks: Ranks, method: str, mode: str) -> None:
    compare(ranks, "llama", {"parallel": {"cp": 4, "cp_method": method}, "memory": {"activation_checkpointing": mode}})


def pairs_of_a_rank(rank: int, cp: int, length: int) -> int:
    """Pairs of a query and a key that a rank's kernels compute in `RingAttention.attend`; a causal block's in part."""
    pairs = 0

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal pairs
            if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
                queries, keys, causal = args[0].shape[2], args[1].shape[2], len(args) > 4 and args[4]
                pairs += queries * (queries + 1) // 2 if causal else queries * keys
            return func(*args, **(kwargs or {}))

    group = group_of(rank, cp)
    assert group is not None
    ring = RingAttention(group)
    tensors = (torch.randn(1, 2, length // cp, 8) for _ in range(3))
    options: dict[str, Any] = {"length": length, "dtype": torch.float32, "device": torch.device("cpu")}
    with Counted():
        ring.attend(*tensors, scale=0.4, mask=ring.make_mask(None, None, **options))
    return pairs


@pytest.mark.parametrize("cp", [2, 4])
def test_every_rank_of_ring_attention_computes_equally_many_pairs(ranks: Ranks, cp: int) -> None:
    length = 64
    part = length // cp
    assert ranks.run(pairs_of_a_rank, cp, length) == [part * (part + 1) // 2 + (cp - 1) * part * part // 2] * 4
    # of contiguous parts the last rank would compute its own causal block and all earlier ones
    contiguous = part * (part + 1) // 2 + (cp - 1) * part * part
    assert contiguous / ranks.run(pairs_of_a_rank, cp, length)[0] == pytest.approx((2 * cp - 1) / cp, rel=0.02)


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
def test_the_math_implementation_equals_the_flash_kernels(mask: AttentionMask) -> None:
    query, key, value, grad = drawn(heads=(3, 3, 3, 3))
    options: dict[str, Any] = {"scale": 0.4, "causal": mask.causal}
    outputs = attention_forward(query, key, value, scale=0.4, mask=mask)
    for kernel, formula in zip(outputs, math_forward(query, key, value, **options), strict=True):
        assert torch.allclose(kernel, formula, atol=1e-5)
    for kernel, formula in zip(
        attention_backward(grad, query, key, value, *outputs, scale=0.4, mask=mask),
        math_backward(grad, query, key, value, *outputs, **options),
        strict=True,
    ):
        assert torch.allclose(kernel, formula, atol=1e-5)


def drawn(heads: tuple[int, ...], *, length: int = 7) -> list[Tensor]:
    """Tensors [2, heads, length, 8]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, each, length, 8, generator=generator) for each in heads]


def lower_triangle_of_two_documents(length: int) -> AttentionMask:
    """Queries of the first document attend to no key but their own; the mask of a block, with rows without keys."""
    allowed = torch.ones(1, 1, length, length).tril(-1).bool()
    allowed[..., 4:, :4] = False
    return AttentionMask(additive=torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf))


def test_a_query_without_keys_in_a_block_has_no_weight_in_it() -> None:
    query, key, value = drawn(heads=(4, 2, 2))
    out, log_sum = attention_forward(query, key, value, scale=0.4, mask=lower_triangle_of_two_documents(7))
    assert (log_sum[:, :, [0, 4]] == -torch.inf).all()
    assert (out[:, :, [0, 4]] == 0).all()
    assert log_sum[:, :, [1, 2, 3, 5, 6]].isfinite().all()


def test_the_backward_pass_by_recomputation_equals_that_of_the_kernel() -> None:
    """FlexAttention has no backward pass on a CPU: the formula is tried with plain mathematics."""
    mask = lower_triangle_of_two_documents(7)
    assert mask.additive is not None
    additive = mask.additive
    query, key, value, grad, merged = drawn(heads=(4, 2, 2, 4, 4))
    _, log_sum = attention_forward(query, key, value, scale=0.4, mask=mask)
    log_sum = torch.logaddexp(log_sum, torch.randn(log_sum.shape, generator=torch.Generator().manual_seed(1)))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ repeat_heads(k, 2).transpose(-1, -2) * 0.4 + additive
        empty = (additive == -torch.inf).all(-1, keepdim=True)
        sums = scores.masked_fill(empty, 0).logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
        return (scores - sums.masked_fill(empty, 0)).exp() @ repeat_heads(v, 2), sums.squeeze(-1)

    expected = attention_backward(grad, query, key, value, merged, log_sum, scale=0.4, mask=mask)
    found = merged_backward(grad, query, key, value, merged, log_sum, forward=forward)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("size", [16, 8, 24])
def test_the_gpu_kernels_accept_their_arguments(size: int) -> None:
    # on meta: the operators' own checks of shapes and arguments, without a GPU
    shapes = ((4, 16), (2, 16), (2, size), (4, size))
    query, key, value, grad = (torch.empty(2, h, 7, d, dtype=torch.bfloat16, device="meta") for h, d in shapes)
    out, log_sum = attention_forward(query, key, value, scale=0.4, mask=CAUSAL)
    assert (out.shape, log_sum.shape, log_sum.dtype) == (grad.shape, (2, 4, 7), torch.float32)
    parts = attention_backward(grad, query, key, value, out, log_sum, scale=0.4, mask=FULL)
    assert [part.shape for part in parts] == [query.shape, key.shape, value.shape]
