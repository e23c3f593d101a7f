"""Measures how ranks of a node slow each other: overlap of collectives with products, and rates of busy devices.

Every function is collective: all ranks call it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipeline.plan.calibration.measure import Ends, range_of, seconds_of, timed

REPEATS = 21
"""Number of measurements of the overlap."""

LONGER = 1.5
"""Seconds of the products over the seconds of the collective beside which they run."""

_ROUNDS = 3
"""Number of measurements of busy devices, each beside a measurement of one device alone."""


def overlap(device: torch.device) -> Ends:
    """Share of an all-reduce that products hide: low, typical and high, each the mean over the ranks.

    The share is (p + c - b) / c, between 0 and 1: c seconds of the all-reduce alone, p of the products alone, b of both
    at the same time. The all-reduce is asynchronous: on a GPU it has NCCL's own stream, on a CPU gloo's threads.
    """
    gradients = torch.ones((1 << 26) if device.type == "cuda" else (1 << 20), device=device)
    product = a_product(device)

    def reduction() -> None:
        work = dist.all_reduce(gradients.zero_(), async_op=True)
        assert work is not None
        work.wait()

    once, alone = seconds_of(product, device)[1], seconds_of(reduction, device, least_s=0.0)[1]
    count = int(_largest(math.ceil(LONGER * alone / once), device))

    def products() -> None:
        for _ in range(count):
            product()

    def both() -> None:
        work = dist.all_reduce(gradients.zero_(), async_op=True)
        products()
        assert work is not None
        work.wait()

    found = []
    for _ in range(REPEATS):
        seconds = []
        for call in (reduction, products, both):
            dist.barrier()
            seconds.append(timed(call, device))
        communication, computation, together = seconds
        found.append(min(1.0, max(0.0, (computation + communication - together) / communication)))
    low, typical, high = (_mean(each, device) for each in range_of(found))
    return low, typical, high


def all_busy(device: torch.device) -> dict[str, float]:
    """Rates of products and copies on all ranks at the same time over those on rank 0 alone; at most 1."""
    source = torch.ones((1 << 28) if device.type == "cuda" else (1 << 22), device=device)
    target = torch.empty_like(source)
    return {
        "products": _busy(a_product(device), device),
        "memory": _busy(lambda: target.copy_(source), device),
    }


def a_product(device: torch.device) -> Callable[[], object]:
    """A function that computes a matrix product of medium size."""
    gpu = device.type == "cuda"
    m, k, n = (8192, 4096, 4096) if gpu else (1024, 512, 512)
    a, b = (torch.randn(*size, device=device).to(torch.bfloat16 if gpu else torch.float32) for size in ((m, k), (k, n)))
    return lambda: a @ b


def _busy(call: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(_ROUNDS):
        dist.barrier()
        together = _largest(seconds_of(call, device)[1], device)
        alone = seconds_of(call, device)[1] if dist.get_rank() == 0 else 0.0
        found.append(_largest(alone, device) / together)
    return min(1.0, statistics.median(found))


def _largest(value: float, device: torch.device) -> float:
    """The largest value over the ranks."""
    found = torch.tensor([value], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _mean(value: float, device: torch.device) -> float:
    """The mean over the ranks."""
    found = torch.tensor([value], device=device)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()
