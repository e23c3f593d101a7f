"""Sets the order in which torch tries its sdpa kernels: the first that supports the inputs runs.

torch's own order changes between versions, so a run sets one. `make gpu-check` times every kernel (row `sdpa-order` of
docs/performance.md).
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
    """Returns the order of the kernels for a GPU's compute capability.

    From Hopper (9.0) on, cuDNN is first: its kernels use the tensor cores' asynchronous instructions and the tensor
    memory accelerator, while torch's FlashAttention is version 2, written for Ampere. Before Hopper, FlashAttention is
    first. Inputs that neither supports (fp32) use the memory-efficient kernel; inputs that no kernel supports use plain
    products.
    """
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    if capability >= _HOPPER:
        return SDPBackend.CUDNN_ATTENTION, flash, efficient, SDPBackend.MATH
    return flash, efficient, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH


def describe_order(order: tuple[SDPBackend, ...]) -> str:
    """Lists the names of kernels in order, as text."""
    return ", ".join(_TITLES[backend] for backend in order)


@contextmanager
def ordered_sdpa(device: torch.device) -> Iterator[str | None]:
    """Sets the order of `sdpa_order` for the process within a block; on a GPU, yields a line that reports the order."""
    if device.type != "cuda":
        yield None
        return
    order = sdpa_order(torch.cuda.get_device_capability(device))
    with sdpa_kernel(list(order), set_priority=True):
        yield f"kernels of scaled dot product attention, the first that fits: {describe_order(order)}"
