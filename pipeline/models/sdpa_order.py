"""The order in which torch's kernels of scaled dot product attention are tried: the first that takes the inputs runs.

torch has an order of its own, which its versions have changed; a run states one. `make gpu-check` times every kernel
(row `sdpa-order` of docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_TITLES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "math",
}
_HOPPER = (9, 0)


def sdpa_order(capability: tuple[int, int]) -> tuple[SDPBackend, ...]:
    """The kernels in their order, for a GPU's compute capability.

    From Hopper (9.0) on cuDNN is first: its kernels use the tensor cores' asynchronous instructions and the tensor
    memory accelerator, while torch's FlashAttention is version 2, written for Ampere. Before Hopper FlashAttention is.
    Inputs that neither takes (fp32) go to the memory-efficient kernel, and those that no kernel takes to plain
    products.
    """
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    if capability >= _HOPPER:
        return SDPBackend.CUDNN_ATTENTION, flash, efficient, SDPBackend.MATH
    return flash, efficient, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH


def describe_order(order: tuple[SDPBackend, ...]) -> str:
    """The names of kernels in their order, as text."""
    return ", ".join(_TITLES[backend] for backend in order)


@contextmanager
def ordered_sdpa(device: torch.device) -> Iterator[str | None]:
    """Sets the order of `sdpa_order` for the process within a block; on a GPU, yields a line that reports it."""
    if device.type != "cuda":
        yield None
        return
    order = sdpa_order(torch.cuda.get_device_capability(device))
    with sdpa_kernel(list(order), set_priority=True):
        yield f"kernels of scaled dot product attention, the first that fits: {describe_order(order)}"
