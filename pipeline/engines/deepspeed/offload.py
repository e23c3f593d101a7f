"""State that DeepSpeed keeps on an NVMe disk.

Stage 3 with `offload_optimizer` on nvme writes those flat fp32 tensors to files that are larger than a block
(`aio.block_size`, 1 MiB unless it says otherwise); between steps they are empty here.
Seen with deepspeed 0.19.8: `runtime/swap_tensor/partitioned_optimizer_swapper.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_swapped(zero: Any, number: int) -> bool:
    """Whether a flat tensor of a ZeRO optimizer and its moments lie on a disk."""
    return bool(getattr(zero, "swap_optimizer", False)) and bool(zero._swappable_optimizer_subgroup(number))


@contextmanager
def brought_in(zero: Any, number: int, *, write: bool) -> Iterator[None]:
    """A flat tensor and its moments are in memory for the length of a block, wherever they lie otherwise.

    Args:
        zero: the engine's `optimizer`.
        number: of the flat tensor.
        write: put them back as they are at the end of the block; else what was changed is lost.
    """
    swapped = is_swapped(zero, number)
    if swapped:
        zero._optimizer_states_and_gradient_swap_in(number)
    yield
    if swapped:
        (zero._optimizer_states_and_gradient_swap_out if write else zero._release_swap_buffers)(number)
