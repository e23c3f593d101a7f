"""Largest peak memory over all ranks, all-reduced only when it has grown."""

from __future__ import annotations

from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.metrics.memory import PeakMemory

GROWTH = 1.01
"""Least growth of a peak that is worth an all-reduce, as a factor."""


class AgreedPeak:
    """Peak memory of the rank that needs most, as all ranks know it.

    Args:
        own: reads this rank's peak memory.

    Attributes:
        known: bytes by name, see `PeakMemory`.
    """

    def __init__(self, own: PeakMemory) -> None:
        self._own = own
        self.known: dict[str, int] = {}

    @property
    def grew(self) -> bool:
        """Whether this rank's peak exceeds the known one by more than `GROWTH`."""
        return any(value > GROWTH * self.known.get(name, 0) for name, value in self._read().items())

    def agree(self, agreement: Agreement) -> None:
        """Finds the maxima over all ranks. Collective."""
        own = self._read()
        self.known = dict(zip(own, agreement.max_over_ranks(*own.values()), strict=True))

    def _read(self) -> dict[str, int]:
        return dict(zip(self._own.names, self._own.read(), strict=True))
