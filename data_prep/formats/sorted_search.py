"""Binary search in memory-mapped arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def first_not_below(rising: npt.NDArray[Any], values: I64) -> I64:
    """int64 [n], index of the first entry that is not below each value; the array's length if there is none.

    Equals np.searchsorted, which would copy the whole array first: the integers in an index file are not aligned.
    """
    low, high = np.zeros(values.size, dtype=np.int64), np.full(values.size, len(rising), dtype=np.int64)
    while np.any(open_ := low < high):
        middle = (low + high) // 2
        below = open_.copy()
        below[open_] = rising[middle[open_]] < values[open_]
        low[below] = middle[below] + 1
        high[open_ & ~below] = middle[open_ & ~below]
    return low
