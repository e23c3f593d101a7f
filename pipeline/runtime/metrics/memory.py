"""Peak memory of a rank since it began: of its GPU, from torch's caching allocator; on the CPU, of the process."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

_GIB = 1 << 30
_RESIDENT_PEAK = re.compile(rb"VmHWM:\s*(\d+) kB")


class PeakMemory:
    """Reads a rank's peak memory, in bytes, without waiting for the device.

    Args:
        device: this rank's device.

    Attributes:
        names: names of the values in rows of metrics; all are peaks since the process began. On a GPU `allocated` is
            held by tensors, `reserved` is held from the device by torch, and not used by others. On a CPU `resident`,
            memory-mapped token files included.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gpu = ("memory_allocated_bytes", "memory_reserved_bytes")
        self.names = gpu if device.type == "cuda" else ("memory_resident_bytes",)

    def read(self) -> list[int]:
        """The peaks so far, in the order of `names`."""
        if self._device.type != "cuda":
            return [resident_peak()]
        stats = torch.cuda.memory_stats(self._device)
        return [stats.get("allocated_bytes.all.peak", 0), stats.get("reserved_bytes.all.peak", 0)]


def resident_peak() -> int:
    """The process's peak resident set size, in bytes. Source: proc(5), VmHWM; elsewhere getrusage(2)."""
    status = Path("/proc/self/status")
    found = _RESIDENT_PEAK.search(status.read_bytes()) if status.exists() else None
    # getrusage's peak is inherited from the process that has started this one, and may be larger
    kib = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * 1024


def show_memory(values: dict[str, int]) -> str:
    """Peaks by name, for people: "mem 61.2 GiB (64.0 reserved)", or "RSS 0.9 GiB"; empty without any."""
    if "memory_resident_bytes" in values:
        return f"RSS {values['memory_resident_bytes'] / _GIB:.1f} GiB"
    if "memory_allocated_bytes" not in values:
        return ""
    reserved = values["memory_reserved_bytes"] / _GIB
    return f"mem {values['memory_allocated_bytes'] / _GIB:.1f} GiB ({reserved:.1f} reserved)"
