"""Access to optimizer state that DeepSpeed offloads to an NVMe disk.

Stage 3 with `offload_optimizer` on nvme writes flat fp32 tensors larger than a block (`aio.block_size`, 1 MiB by
default) to files; between steps these tensors are empty in memory. Verified with deepspeed 0.19.8:
`runtime/swap_tensor/partitioned_optimizer_swapper.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_swapped(optimizer: Any, index: int) -> bool:
    """Whether a flat tensor of a ZeRO optimizer and its states are stored on a disk."""
    return bool(getattr(optimizer, "swap_optimizer", False)) and bool(optimizer._swappable_optimizer_subgroup(index))


@contextmanager
def swapped_in(optimizer: Any, index: int, *, write: bool) -> Iterator[None]:
    """Keeps a flat tensor and its states in memory within a block; does nothing if they are not on a disk.

    Args:
        optimizer: the engine's `optimizer`.
        index: the flat tensor's index.
        write: whether to write changes back to the disk at the end of the block; otherwise they are lost.
    """
    swapped = is_swapped(optimizer, index)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(index)
    yield
    if swapped:
        (optimizer._optimizer_states_and_gradient_swap_out if write else optimizer._release_swap_buffers)(index)
