"""A size of memory as users write it: a number with its unit."""

from __future__ import annotations

import re

_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def bytes_of(text: str) -> int:
    """Converts a size with its unit, e.g. 80GB or 139GiB, to bytes.

    Raises:
        ValueError: the text is no such size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise ValueError("it is not a positive number with a unit: MB, GB, MiB or GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])
