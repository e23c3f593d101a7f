"""The host's available memory, as Linux reports it."""

from __future__ import annotations

import re


def available_memory(meminfo: str) -> int:
    """Returns the available bytes from the text of /proc/meminfo."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, flags=re.MULTILINE)
    assert match is not None, meminfo
    return int(match[1]) * 1024
