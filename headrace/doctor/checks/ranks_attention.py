"""Ring attention and Ulysses over all ranks against one rank's attention over the whole sequence, forward and backward.

Masks: causal, documents, a sliding window. In bf16 the tolerance is that of `headrace prove`: three times the error of
one rank's own bf16 attention against fp32 (`pipeline.plan.proof.tolerance`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.rank_context import device_here, gathered, rendezvous_here
from pipeline.config.topology import sequence_chunks
from pipeline.engines.parallel.context import UlyssesAttention
from pipeline.engines.parallel.ring import RingAttention
from pipeline.models.attention import ContextParallelAttention, attend
from pipeline.models.masks import make_mask
from pipeline.plan.proof.compare import relative_differences
from pipeline.plan.proof.tolerance import fp32_tolerance, half_tolerance

_NAMES = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")
_SIZE = 64
"""Head size: the smallest of the models that are trained with context parallelism."""


@dataclass(frozen=True)
class _Mask:
    """A mask by its documents [1, T] and its sliding window in tokens."""

    name: str
    documents: Tensor | None = None
    window: int | None = None


def run(context: Context) -> Iterable[Finding]:
    """Runs the check; rank 0 reports."""
    world, device = dist.get_world_size(), device_here()
    if world == 1:
        yield Finding(None, "There is one rank, and no attention across ranks.")
        return
    rendezvous, dtype = rendezvous_here(context), _half(device)
    for method, attention in (("ring attention", RingAttention), ("Ulysses", UlyssesAttention)):
        group = dist.group.WORLD
        assert group is not None
        zigzag, length = method == "ring attention", (256 if device.type == "cuda" else 32) * world
        worst = [_errors(attention(group), mask, length, zigzag, dtype, device) for mask in _masks(length, device)]
        by_rank = gathered(max(worst))
        if dist.get_rank() == 0:
            rank = max(range(world), key=lambda each: by_rank[each])
            yield _finding(method, by_rank[rank], where=rendezvous.describe([rank]), dtype=dtype)


def _finding(method: str, worst: tuple[float, float, float, str], *, where: str, dtype: torch.dtype) -> Finding:
    share, difference, tolerance, location = worst
    kind = str(dtype).removeprefix("torch.")
    text = f"{method} in {kind}: the largest relative error is {difference:.1e}, of the {location} on {where}"
    figures = {"largest_error": difference, "tolerance": tolerance}
    if share <= 1:
        return Finding(True, f"{text} (tolerance {tolerance:.1e}).", figures=figures)
    return Finding(
        False,
        f"{text}, and {tolerance:.1e} is allowed.",
        "a training with parallel.cp would learn from wrong gradients without an error",
        "do not use this parallel.cp_method on this machine; report it with the versions of torch, CUDA and driver",
        figures,
        where,
    )


def _masks(length: int, device: torch.device) -> Iterable[_Mask]:
    yield _Mask("causal")
    # documents end inside and at the borders of ranks' parts, and one is a single token
    ends = torch.tensor([length // 8 - 3, length // 8 - 2, length // 2, length - length // 5], device=device)
    positions = torch.arange(length, device=device)
    yield _Mask("document", documents=torch.bucketize(positions, ends, right=True)[None])
    yield _Mask("sliding window", window=length // 3)


def _half(device: torch.device) -> torch.dtype:
    """bf16 where the device computes attention in it, forward and backward; else fp32."""
    try:
        query = torch.ones(1, 1, 4, _SIZE, dtype=torch.bfloat16, device=device, requires_grad=True)
        attend(query, query, query, scale=1.0, mask=make_mask(None, None, **_options(4, query))).sum().backward()
    except RuntimeError:
        return torch.float32
    return torch.bfloat16


def _options(length: int, like: Tensor) -> dict[str, Any]:
    return {"length": length, "dtype": like.dtype, "device": like.device}


def _errors(
    attention: ContextParallelAttention,
    mask: _Mask,
    length: int,
    zigzag: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, float, float, str]:
    """Compares this rank's part; returns the worst (difference / tolerance, difference, tolerance, tensor and mask)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(7)
    heads = (2 * world, world, world, 2 * world)
    whole = [torch.randn(1, each, length, _SIZE, generator=generator).to(device, dtype) for each in heads]
    chunks = sequence_chunks(length, cp=world, cp_rank=rank, zigzag=zigzag)
    own = torch.tensor([p for chunk in chunks for p in chunk], device=device)
    options = _options(length, whole[0])
    expected = _passes(whole, lambda q, k, v: attend(q, k, v, scale=_SIZE**-0.5, mask=_whole_mask(mask, q, length)))
    exact = _passes(
        [each.float() for each in whole],
        lambda q, k, v: attend(q, k, v, scale=_SIZE**-0.5, mask=_whole_mask(mask, q, length)),
    )
    made = attention.make_mask(mask.documents, mask.window, **options)
    found = _passes(
        [each[:, :, own] for each in whole], lambda q, k, v: attention.attend(q, k, v, scale=_SIZE**-0.5, mask=made)
    )
    expected, exact = ({name: value[:, :, own] for name, value in each.items()} for each in (expected, exact))
    differences = relative_differences(found, exact)
    if dtype == torch.float32:
        tolerance = fp32_tolerance(list(_NAMES), tokens=length).gradient
    else:
        tolerance = half_tolerance("bf16", relative_differences(expected, exact), tokens=length).gradient
    name = max(_NAMES, key=lambda each: differences[each] / tolerance[each])
    return differences[name] / tolerance[name], differences[name], tolerance[name], f"{name}, {mask.name} mask,"


def _whole_mask(mask: _Mask, query: Tensor, length: int) -> Any:
    return make_mask(mask.documents, mask.window, **_options(length, query))


def _passes(tensors: list[Tensor], attention: Any) -> dict[str, Tensor]:
    """Output and gradients of attention; the tensors are queries, keys, values and the gradient of the output."""
    inputs = [each.detach().clone().requires_grad_() for each in tensors[:3]]
    output = attention(*inputs)
    output.backward(tensors[3])
    gradients = [each.grad for each in inputs]
    return dict(zip(_NAMES, (output.detach(), *gradients), strict=True))
