"""What Linux says of the host's memory."""

from __future__ import annotations

import re


def available_memory(meminfo: str) -> int:
    """Bytes that /proc/meminfo says are available."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, flags=re.MULTILINE)
    assert match is not None, meminfo
    return int(match[1]) * 1024
