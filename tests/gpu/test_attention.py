"""Attention kernels of a GPU against plain mathematics: torch's backends, and FlexAttention with our masks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

from foundation.errors import ConfigError
from pipeline.engines.parallel.kernels import attention_backward, attention_forward
from pipeline.models.attention import attend, repeat_heads
from pipeline.models.flash_attention import check_flash_attention
from pipeline.models.masks import AttentionMask, make_mask, make_part_mask
from tests.gpu.device import DEVICE, MARKS, difference, needs_cuda

pytestmark = MARKS
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
BF16 = 1e-2
"""Relative 2-norm of bf16 results against fp32: 8 bits of mantissa give 2^-9 per rounding, of which there are some."""
FP32 = 1e-3
"""TF32 in FlexAttention's matrix products has 10 bits of mantissa, so 2^-11 per rounding."""
SCALE = 0.125


def inputs(dtype: torch.dtype, *, length: int, key_heads: int) -> list[Tensor]:
    """Query [2, 8, length, 64], and key and value with fewer heads."""
    torch.manual_seed(0)
    heads = (8, key_heads, key_heads)
    drawn = [torch.randn(2, each, length, 64, device=DEVICE).to(dtype) for each in heads]
    return [tensor.requires_grad_() for tensor in drawn]


def with_gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of the inputs, for a fixed gradient of the output."""
    torch.manual_seed(1)
    given = torch.randn(out.shape, device=DEVICE).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, given)]


def dense(tensors: list[Tensor], mask: Tensor) -> Tensor:
    """Attention written out, in fp32; `mask` is additive."""
    query, key, value = (tensor.float() for tensor in tensors)
    key, value = (repeat_heads(each, query.shape[1] // each.shape[1]) for each in (key, value))
    weights = (query @ key.transpose(-1, -2) * SCALE + mask).softmax(-1)
    return weights @ value


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("key_heads", [8, 2])
def test_every_backend_of_torch_attends_causally_as_the_formula_says(name: str, key_heads: int) -> None:
    if not hasattr(SDPBackend, name):
        pytest.skip(f"this torch has no {name}")
    tensors = inputs(torch.bfloat16, length=256, key_heads=key_heads)
    mask = torch.full((256, 256), -torch.inf, device=DEVICE).triu(1)
    expected = with_gradients(dense(tensors, mask), tensors)
    grouped = key_heads != 8
    try:
        with sdpa_kernel(getattr(SDPBackend, name)):
            out = F.scaled_dot_product_attention(*tensors, is_causal=True, scale=SCALE, enable_gqa=grouped)
    except RuntimeError as error:
        pytest.skip(f"{name} does not run{' with grouped heads' if grouped else ''} here: {str(error)[:80]}")
    found = with_gradients(out, tensors)
    assert max(itertools.starmap(difference, zip(found, expected, strict=True))) < BF16


MASKS = {
    "documents": (True, None),
    "window": (False, 100),
    "documents and window": (True, 200),
}


@needs_cuda
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("length", [384, 300])  # 300: the last block of 128 is not full
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, BF16), (torch.float32, FP32)])
@pytest.mark.parametrize("case", MASKS)
def test_flex_attention_and_its_gradients_are_those_of_the_dense_mask(
    case: str, dtype: torch.dtype, tolerance: float, length: int, key_heads: int
) -> None:
    packed, window = MASKS[case]
    positions = torch.arange(length, device=DEVICE)
    documents = torch.stack([positions // 70, positions // 150]).int() if packed else None
    common = {"length": length, "dtype": torch.float32, "device": DEVICE}
    plain, blocks = (make_mask(documents, window, **common, blocks=each) for each in (False, True))
    assert plain.additive is not None
    assert blocks.blocks is not None
    tensors = inputs(dtype, length=length, key_heads=key_heads)
    expected = with_gradients(dense(tensors, plain.additive), tensors)
    found = with_gradients(attend(*tensors, scale=SCALE, mask=blocks), tensors)
    assert max(itertools.starmap(difference, zip(found, expected, strict=True))) < tolerance


@needs_cuda
@pytest.mark.parametrize("case", MASKS)
def test_blocks_of_ring_attention_merge_to_the_whole_with_their_gradients(case: str) -> None:
    # two chunks of queries, and the keys of two ranks one after the other, as at two hops
    packed, window = MASKS[case]
    length, chunk = 512, 128
    positions = torch.arange(length, device=DEVICE)
    documents = torch.stack([positions // 70, positions // 150]).int() if packed else None
    whole = make_mask(documents, window, length=length, dtype=torch.float32, device=DEVICE, blocks=False)
    assert whole.additive is not None
    tensors = inputs(torch.bfloat16, length=length, key_heads=2)
    rows = torch.cat([positions[chunk : 2 * chunk], positions[2 * chunk : 3 * chunk]])
    expected = with_gradients(dense(tensors, whole.additive)[:, :, rows], tensors)
    query, key, value = (each.detach() for each in tensors)
    queries = (range(chunk, 2 * chunk), range(2 * chunk, 3 * chunk))
    hops = [((range(chunk, 2 * chunk), range(2 * chunk, 3 * chunk)), rows), ((range(chunk),), positions[:chunk])]
    parts = []
    for keys, columns in hops:
        mask = make_part_mask(documents, window, queries=queries, keys=keys, dtype=torch.bfloat16, device=DEVICE)
        assert mask is not None
        k, v = key[:, :, columns], value[:, :, columns]
        parts.append((mask, columns, *attention_forward(query[:, :, rows], k, v, scale=SCALE, mask=mask)))
    log_sum = torch.logaddexp(parts[0][3], parts[1][3])
    out = sum(part[2].float() * (part[3] - log_sum).exp().unsqueeze(-1) for part in parts)
    assert isinstance(out, Tensor)
    out = out.bfloat16()
    torch.manual_seed(1)
    given = torch.randn(out.shape, device=DEVICE).bfloat16()
    found = [torch.zeros_like(each, dtype=torch.float32) for each in tensors]
    for mask, columns, _, _ in parts:
        k, v = key[:, :, columns], value[:, :, columns]
        grads = attention_backward(given, query[:, :, rows], k, v, out, log_sum, scale=SCALE, mask=mask)
        found[0][:, :, rows] += grads[0]
        for total, grad in zip(found[1:], grads[1:], strict=True):
            total[:, :, columns] += grad
    assert max(itertools.starmap(difference, zip([out, *found], expected, strict=True))) < BF16


@needs_cuda
def test_attention_over_64k_packed_tokens_makes_no_square_mask() -> None:
    length = 65536
    documents = (torch.arange(length, device=DEVICE) // 3000).int()[None]
    mask: AttentionMask = make_mask(documents, None, length=length, dtype=torch.bfloat16, device=DEVICE)
    shape = (1, 4, length, 64)
    tensors = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    attend(*tensors, scale=SCALE, mask=mask).sum().backward()
    # inputs, outputs and gradients are 7 x 32 MiB; a mask of S x S would be 4 GiB in a byte per entry
    assert torch.cuda.max_memory_allocated() < 2**30


@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("version", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_a_layer_with_flash_attention_computes_what_eager_attention_does(version: str, compiled: bool) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2)
    try:
        check_flash_attention(version, DEVICE)
        with DEVICE:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=version)
    except (ConfigError, ImportError) as error:
        pytest.skip(f"{version} is not there: {str(error)[:120]}")
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").to(DEVICE)
    plain.load_state_dict(model.state_dict())
    if compiled:
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    ids = torch.arange(2 * 256, device=DEVICE).reshape(2, 256) % 61
    found, expected = (each(input_ids=ids, labels=ids, use_cache=False) for each in (model, plain))
    found.loss.backward()
    expected.loss.backward()
    assert difference(found.logits, expected.logits) < BF16
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert max(difference(own.grad, other.grad) for own, other in pairs) < 3 * BF16
