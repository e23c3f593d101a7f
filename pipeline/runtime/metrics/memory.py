"""Peak memory of a rank since it began: on a GPU from torch's caching allocator, on the CPU of the process.

A GPU's allocator that finds no memory frees all that it has kept, waiting for the device, and tries again: every such
retry slows a step down, and an error of memory is near.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

_GIB = 1 << 30
_STATISTICS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries")
_RESIDENT_PEAK = re.compile(rb"VmHWM:\s*(\d+) kB")


class PeakMemory:
    """Reads a rank's peak memory, in bytes, and its allocator's retries, without waiting for the device.

    Args:
        device: this rank's device.

    Attributes:
        names: names of the values in rows of metrics; all are peaks since the process began. On a GPU `allocated` is
            the memory of tensors, and `reserved` the memory that torch has taken from the device; `allocator_retries`
            is the number of retries. On a CPU `resident` includes memory-mapped token files.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gpu = ("memory_allocated_bytes", "memory_reserved_bytes", "allocator_retries")
        self.names = gpu if device.type == "cuda" else ("memory_resident_bytes",)

    def read(self) -> list[int]:
        """Returns the peaks, and the number of retries, so far; in the order of `names`."""
        if self._device.type != "cuda":
            return [resident_peak()]
        stats = torch.cuda.memory_stats(self._device)
        return [stats.get(key, 0) for key in _STATISTICS]


def resident_peak() -> int:
    """Reads the process's peak resident set size, in bytes. Source: proc(5), VmHWM; elsewhere getrusage(2)."""
    status = Path("/proc/self/status")
    found = _RESIDENT_PEAK.search(status.read_bytes()) if status.exists() else None
    # getrusage's peak is inherited from the parent process, and may be larger
    kib = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * 1024


def show_memory(values: dict[str, int]) -> str:
    """Formats peaks for people: "mem 61.2 GiB (64.0 reserved)", or "RSS 0.9 GiB"; empty without peaks."""
    if "memory_resident_bytes" in values:
        return f"RSS {values['memory_resident_bytes'] / _GIB:.1f} GiB"
    if "memory_allocated_bytes" not in values:
        return ""
    reserved = values["memory_reserved_bytes"] / _GIB
    return f"mem {values['memory_allocated_bytes'] / _GIB:.1f} GiB ({reserved:.1f} reserved)"
