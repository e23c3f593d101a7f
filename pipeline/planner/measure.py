"""Measures the rates of one device: matrix products by shape and dtype, attention, copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from pipeline.machines.machine import Dtype, MeasuredProduct

REPEATS = 7
"""Measurements of one thing, from which its range comes."""

_DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

GPU_SHAPES = ((4096, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14336), (16384, 8192, 8192), (8192, 8192, 28672))
"""(m, k, n) of products on a GPU: projections and MLPs of models of 1B, 8B and 70B, micro-batches of 4,096 to 16,384
positions."""

CPU_SHAPES = ((256, 128, 512), (512, 256, 704), (1024, 512, 2048), (1024, 1024, 1024))
"""The same on a CPU, for models of tests."""

Ends = tuple[float, float, float]


def seconds_of(
    call: Callable[[], object], device: torch.device, *, repeats: int = REPEATS, least_s: float = 0.02
) -> Ends:
    """Least, median and most seconds of a call, each measured over as many calls as take `least_s`.

    Args:
        call: is run twice before, so that kernels are chosen and memory is there.
        device: that is waited for.
        repeats: measurements.
        least_s: of a measurement.
    """
    for _ in range(2):
        call()
    once = max(_timed(call, device, 1), 1e-7)
    times = max(1, round(least_s / once))
    found = sorted(_timed(call, device, times) / times for _ in range(repeats))
    return found[0], statistics.median(found), found[-1]


def rates(work: float, seconds: Ends) -> Ends:
    """Low, typical and high rate of some work that takes so many seconds."""
    least, median, most = seconds
    return work / most, work / median, work / least


def products(device: torch.device, shapes: Sequence[tuple[int, int, int]]) -> list[MeasuredProduct]:
    """FLOP/s of matrix products, 2 m k n FLOPs each, in every dtype that the device multiplies."""
    found = []
    for name, dtype in _DTYPES.items():
        if name == "fp16" and device.type == "cpu":
            continue  # no model is trained so
        for m, k, n in shapes:
            a, b = (torch.randn(*size, device=device, dtype=torch.float32).to(dtype) for size in ((m, k), (k, n)))
            seconds = seconds_of(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
            found.append(MeasuredProduct(dtype=name, m=m, k=k, n=n, flops_per_s=rates(2.0 * m * k * n, seconds)))
    return found


def attention(device: torch.device) -> Ends:
    """FLOP/s of causal attention, forward: 2 B H T T d, the half of the scores and values that kernels compute."""
    gpu = device.type == "cuda"
    batch, heads, length, size = (2, 32, 8192, 128) if gpu else (1, 4, 512, 64)
    dtype = torch.bfloat16 if gpu else torch.float32
    q, k, v = (torch.randn(batch, heads, length, size, device=device, dtype=dtype) for _ in range(3))
    seconds = seconds_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    return rates(2.0 * batch * heads * length * length * size, seconds)


def copies(device: torch.device) -> Ends:
    """Bytes per second that copies within the device's memory read and write together."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 26), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return rates(2.0 * source.numel(), seconds_of(lambda: target.copy_(source), device))


def host_copies(device: torch.device) -> Ends:
    """Bytes per second between the host's page-locked memory and the device; of a CPU those of a copy."""
    if device.type != "cuda":
        low, typical, high = copies(device)
        return low / 2, typical / 2, high / 2
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return rates(float(source.numel()), seconds_of(lambda: target.copy_(source, non_blocking=True), device))


def _timed(call: Callable[[], object], device: torch.device, times: int) -> float:
    _wait(device)
    started = time.perf_counter()
    for _ in range(times):
        call()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
