"""Measures the rates of one device: matrix products of linear layers by shape and dtype, attention, copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from pipeline.plan.predict.work import ATTENTION_BACKWARD
from pipeline.runtime.machines.machine import Dtype, MeasuredProduct

REPEATS = 12
"""Number of measurements of a rate, from which its range comes."""

_DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

GPU_SHAPES = ((4096, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14336), (16384, 8192, 8192), (8192, 8192, 28672))
"""(m, k, n) of products on a GPU: projections and MLPs of models of 1B, 8B and 70B parameters, with micro-batches of
4,096 to 16,384 positions."""

CPU_SHAPES = ((128, 256, 1024), (256, 128, 512), (512, 512, 2048), (1024, 1024, 1024))
"""(m, k, n) of products on a CPU, for models of tests."""

_ROUNDS = 3
"""Rounds over all shapes, so that a disturbance of a second does not slow the measurements of one shape alone."""

_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 22}
"""Elements of all weights of a measurement: too many for the caches of a GPU or of a single core."""

Ends = tuple[float, float, float]
Clock = Callable[[], float]
"""Function that returns the seconds since some fixed moment."""


def seconds_of(
    call: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = REPEATS,
    least_s: float = 0.02,
    clock: Clock = time.perf_counter,
) -> Ends:
    """Returns the least, median and most seconds of a call, each measured over as many calls as take `least_s`.

    Args:
        call: function to time; it is called twice before timing, so that kernels are chosen and memory is allocated.
        device: device to synchronize with, if it is a GPU.
        repeats: number of measurements.
        least_s: least seconds of a measurement.
        clock: clock that measures the seconds.
    """
    return range_of(_samples(call, device, repeats=repeats, least_s=least_s, clock=clock))


def _samples(
    call: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    least_s: float = 0.02,
    clock: Clock = time.perf_counter,
) -> list[float]:
    for _ in range(2):
        call()
    once = max(timed(call, device, clock=clock), 1e-7)
    times = max(1, round(least_s / once))
    return [timed(call, device, times, clock=clock) / times for _ in range(repeats)]


def range_of(values: Sequence[float]) -> Ends:
    """The least, median and most of some values."""
    return min(values), statistics.median(values), max(values)


def rates(work: float, seconds: Ends) -> Ends:
    """Low, typical and high rate of some work that takes the given seconds."""
    least, median, most = seconds
    return work / most, work / median, work / least


def products(device: torch.device, shapes: Sequence[tuple[int, int, int]]) -> list[MeasuredProduct]:
    """FLOP/s of linear layers, forward and backward, in every dtype that the device multiplies.

    Each layer takes three products of 2 m k n FLOPs, by autograd. Layers run one after the other, as in a model: no
    cache holds the weights, and gradients are newly allocated.

    Args:
        device: device to measure.
        shapes: (m, k, n): positions, inputs and outputs of the layer.
    """
    dtypes = {name: dtype for name, dtype in _DTYPES.items() if name != "fp16" or device.type != "cpu"}
    keys = [(name, shape) for name in dtypes for shape in shapes]  # no model is trained in fp16 on a CPU
    samples: dict[tuple[Dtype, tuple[int, int, int]], list[float]] = {key: [] for key in keys}
    for _ in range(_ROUNDS):
        for name, shape in keys:
            layers = _layers(shape, device)
            samples[name, shape] += _samples(
                _linear_layers(layers, shape, dtypes[name], device), device, repeats=-(-REPEATS // _ROUNDS)
            )
    found = []
    for (name, shape), seconds in samples.items():
        m, k, n = shape
        flops = 6.0 * _layers(shape, device) * m * k * n
        found.append(MeasuredProduct(dtype=name, m=m, k=k, n=n, flops_per_s=rates(flops, range_of(seconds))))
    return found


def _layers(shape: tuple[int, int, int], device: torch.device) -> int:
    _, k, n = shape
    return max(1, _ELEMENTS[device.type] // (k * n))


def _linear_layers(
    layers: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """Returns a function that runs a forward and a backward pass of parallel linear layers."""
    m, k, n = shape
    weights = [torch.randn(n, k, device=device).to(dtype).requires_grad_() for _ in range(layers)]
    inputs, gradients = (torch.randn(m, width, device=device).to(dtype) for width in (k, n))
    inputs.requires_grad_()

    def passes() -> None:
        for each in (inputs, *weights):
            each.grad = None
        outputs = [F.linear(inputs, weight) for weight in weights]
        torch.autograd.backward(outputs, [gradients] * layers)

    return passes


def attention(device: torch.device) -> Ends:
    """FLOP/s of causal attention, forward and backward: (1 + 2.5) x 2 B H T T d, the half that kernels compute."""
    gpu = device.type == "cuda"
    batch, heads, length, size = (2, 32, 8192, 128) if gpu else (1, 4, 256, 64)
    dtype = torch.bfloat16 if gpu else torch.float32
    q, k, v = (torch.randn(batch, heads, length, size, device=device, dtype=dtype).requires_grad_() for _ in range(3))

    def passes() -> None:
        q.grad = k.grad = v.grad = None
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    flops = (1 + ATTENTION_BACKWARD) * 2.0 * batch * heads * length * length * size
    return rates(flops, seconds_of(passes, device))


def copies(device: torch.device) -> Ends:
    """Bytes per second that copies within the device's memory read and write together."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 24), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return rates(2.0 * source.numel(), seconds_of(lambda: target.copy_(source), device))


def host_copies(device: torch.device) -> Ends:
    """Bytes per second between the host's page-locked memory and the device; on a CPU, bytes copied per second."""
    if device.type != "cuda":
        low, typical, high = copies(device)
        return low / 2, typical / 2, high / 2
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return rates(float(source.numel()), seconds_of(lambda: target.copy_(source, non_blocking=True), device))


def timed(
    call: Callable[[], object], device: torch.device, times: int = 1, *, clock: Clock = time.perf_counter
) -> float:
    """Seconds of `times` calls, until a GPU has finished them."""
    _wait(device)
    started = clock()
    for _ in range(times):
        call()
    _wait(device)
    return clock() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
