"""How the cost of a part grows, and what follows at a size that was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LINEAR = 1.2
"""Exponents up to this are linear: n log n over the sizes of a sweep, and the noise of a shared machine."""


@dataclass(frozen=True)
class Growth:
    """Power law through measured values.

    Attributes:
        sizes: ascending.
        values: positive.
    """

    sizes: Sequence[int]
    values: Sequence[float]

    @property
    def exponent(self) -> float:
        """Least squares of the logarithms over all sizes; nan where a value is not positive."""
        if min(self.values) <= 0:
            return float("nan")
        return float(np.polyfit(np.log(self.sizes), np.log(self.values), 1)[0])

    def at(self, size: int) -> float:
        """The value at a size: measured, or from the largest one on with the larger of two exponents.

        That over all sizes is too small where a constant hides the growth, that of the two largest sizes is noisy.
        """
        if size in self.sizes:
            return self.values[self.sizes.index(size)]
        if min(self.values) <= 0:
            return self.values[-1]
        last = Growth(self.sizes[-2:], self.values[-2:]).exponent
        return float(self.values[-1] * (size / self.sizes[-1]) ** max(0.0, self.exponent, last))
