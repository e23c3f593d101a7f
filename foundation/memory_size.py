"""Sizes of memory: as users write them, with a unit; and the host's available memory, as Linux reports it."""

from __future__ import annotations

import re

_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def bytes_of(text: str) -> int:
    """Converts a size with its unit, e.g. 80GB or 139GiB, to bytes.

    Raises:
        ValueError: the text is not a size with a unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise ValueError("it is not a positive number with a unit: MB, GB, MiB or GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def available_memory(meminfo: str) -> int:
    """Returns the available bytes from the text of /proc/meminfo."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, flags=re.MULTILINE)
    assert match is not None, meminfo
    return int(match[1]) * 1024
