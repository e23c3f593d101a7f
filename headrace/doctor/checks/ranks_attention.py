"""Ring attention and Ulysses over ranks against one rank's attention over the whole sequence, forward and backward.

Groups of up to 8 ranks, as for context parallelism. Masks: causal, documents, a sliding window. All in bf16; the
tolerance is that of `headrace prove`: three times the error of one rank's own bf16 attention against fp32
(`pipeline.plan.proof.tolerance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.doctor.check import Context, Finding
from headrace.doctor.checks.shared import device_here, gathered, judged, rendezvous_here
from pipeline.config.topology import Topology, sequence_chunks
from pipeline.engines.parallel.context import UlyssesAttention
from pipeline.engines.parallel.mesh import Mesh
from pipeline.engines.parallel.ring import RingAttention
from pipeline.models.attention import attend
from pipeline.models.masks import make_mask
from pipeline.plan.proof.compare import relative_differences
from pipeline.plan.proof.tolerance import half_tolerance

_NAMES = ["output", "gradient of the queries", "gradient of the keys", "gradient of the values"]
_SIZE = 64
"""Head size: the smallest of the models that are trained with context parallelism."""
_METHODS: dict[str, type[Any]] = {"ring attention": RingAttention, "Ulysses": UlyssesAttention}


def run(context: Context) -> Iterable[Finding]:
    """Runs the check; rank 0 reports."""
    world, device = dist.get_world_size(), device_here()
    cp = max(each for each in (1, 2, 4, 8) if world % each == 0)
    if cp == 1:
        yield Finding(None, f"{world} ranks form no groups of 2, 4 or 8, and there is no attention across ranks.")
        return
    rendezvous, length = rendezvous_here(context), (256 if device.type == "cuda" else 32) * cp
    group = Mesh(Topology(dp=world // cp, cp=cp), device_type=device.type).group("cp")
    for method, kind in _METHODS.items():
        found = gathered(max(_worst(kind(group), mask, length, group, device) for mask in _masks(length)))
        rank = max(range(world), key=lambda each: found[each])
        if dist.get_rank() == 0:
            yield _finding(f"{method} in bf16", *found[rank], where=rendezvous.describe([rank]))


def _finding(method: str, share: float, difference: float, tolerance: float, tensor: str, *, where: str) -> Finding:
    text = f"{method}: the largest relative error is {difference:.1e} of the {tensor} on {where} (tolerance"
    meaning = "a training with parallel.cp would learn from wrong gradients without an error"
    remedy = "use the other parallel.cp_method on this machine, and report this with the versions of torch and driver"
    figures = {"largest_error": difference, "tolerance": tolerance}
    return judged(share <= 1, f"{text} {tolerance:.1e}).", meaning, remedy, figures, where)


def _masks(length: int) -> list[tuple[str, Tensor | None, int | None]]:
    """Name, documents [1, T] and window of every mask; one document is a single token, others cross ranks' borders."""
    ends = torch.tensor([length // 8 - 3, length // 8 - 2, length // 2, length - length // 5])
    documents = torch.bucketize(torch.arange(length), ends, right=True)[None]
    return [("causal", None, None), ("document", documents, None), ("sliding window", None, length // 3)]


def _worst(
    attention: Any, mask: tuple[str, Tensor | None, int | None], length: int, group: Any, device: torch.device
) -> tuple[float, float, float, str]:
    """Compares this rank's part; returns difference / tolerance, difference, tolerance and name of the worst tensor."""
    cp, rank, name = dist.get_world_size(group), dist.get_rank(group), mask[0]
    documents, window = None if mask[1] is None else mask[1].to(device), mask[2]
    generator = torch.Generator().manual_seed(7)
    heads = (2 * cp, cp, cp, 2 * cp)
    whole = [torch.randn(1, each, length, _SIZE, generator=generator).to(device, torch.bfloat16) for each in heads]
    zigzag = isinstance(attention, RingAttention)
    own = torch.tensor([p for c in sequence_chunks(length, cp=cp, cp_rank=rank, zigzag=zigzag) for p in c])
    part = [each[:, :, own] for each in whole]
    made = attention.make_mask(documents, window, length=length, dtype=torch.bfloat16, device=device)
    found = _passes(part, lambda q, k, v: attention.attend(q, k, v, scale=_SIZE**-0.5, mask=made))
    alone, exact = (
        {key: value[:, :, own] for key, value in _passes(tensors, _whole(documents, window)).items()}
        for tensors in (whole, [each.float() for each in whole])
    )
    tolerances = half_tolerance("bf16", relative_differences(alone, exact), tokens=length).gradient
    shares = [(each / tolerances[key], each, key) for key, each in relative_differences(found, exact).items()]
    share, difference, key = max(shares)
    return share, difference, tolerances[key], f"{key}, {name} mask,"


def _whole(documents: Tensor | None, window: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One rank's attention over the whole sequence."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = make_mask(documents, window, length=query.shape[2], dtype=query.dtype, device=query.device)
        return attend(query, key, value, scale=_SIZE**-0.5, mask=mask)

    return attention


def _passes(tensors: list[Tensor], attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Output and gradients of attention; the tensors are queries, keys, values and the gradient of the output."""
    inputs = [each.detach().clone().requires_grad_() for each in tensors[:3]]
    output = attention(*inputs)
    output.backward(tensors[3])
    return dict(zip(_NAMES, (output.detach(), *(each.grad for each in inputs)), strict=True))  # type: ignore[arg-type]
