"""Detects kills by the kernel's out-of-memory killer on this host."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

HOST_MEMORY = (
    "the kernel's out-of-memory killer, host memory is short\n"
    "  try: run.async_checkpoints false, no run.in_memory_checkpoints, no offload, fewer ranks per host or more memory"
    " for the job; without a GPU train_micro_batch_size_per_gpu 1 and memory.activation_checkpointing full"
    " (docs/how-to/out-of-memory.md)"
)
"""End of a message about a rank that the out-of-memory killer has ended."""


def out_of_memory_kills() -> int:
    """Counts the processes that it has killed since boot, in all cgroups; 0 where unknown."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
