"""Largest peak memory over all ranks, all-reduced only when it has grown."""

from __future__ import annotations

from pipeline.run.hooks.hook import Hook, HookContext, StepNumbers
from pipeline.runtime.faults.agreement import Agreement
from pipeline.runtime.metrics.memory import PeakMemory

GROWTH = 1.01
"""Smallest growth of a peak that is worth an all-reduce, as a factor."""


def make(context: HookContext) -> Hook:
    """Makes the hook."""
    agreement = context.here.agreement
    return AgreedPeak(PeakMemory(agreement.device), agreement)


class AgreedPeak(Hook):
    """Largest peak memory of any rank, known to all ranks.

    Args:
        own: reads this rank's peak memory.
        agreement: all-reduces the peaks.
    """

    def __init__(self, own: PeakMemory, agreement: Agreement) -> None:
        self._own, self._agreement = own, agreement
        self._known: dict[str, int] = {}
        self._agreed = 0  # the last step begun when the known peak was found; flags up to it are out of date

    def flag(self) -> bool:
        """Tells whether this rank's peak exceeds the known peak by more than `GROWTH`."""
        return any(value > GROWTH * self._known.get(name, 0) for name, value in self._read().items())

    def numbers(self, numbers: StepNumbers, *, raised: bool) -> None:
        """Finds the maxima over all ranks if any peak has grown; adds them to the step's numbers."""
        if raised and numbers.step > self._agreed:
            own = self._read()
            self._known = dict(zip(own, self._agreement.max_over_ranks(*own.values()), strict=True))
            self._agreed = numbers.begun
        numbers.memory = self._known

    def _read(self) -> dict[str, int]:
        return dict(zip(self._own.names, self._own.read(), strict=True))
