"""Whether the numbers of a step are out of the ordinary, judged by the steps before it.

A value is a spike when it lies more than k robust deviations above the median of the last steps that were applied. The
deviation is 1.4826 times the median absolute deviation, which for a normal distribution is its standard deviation
(Rousseeuw and Croux 1993, "Alternatives to the Median Absolute Deviation", section 1); unlike that it does not grow
with the very values it is to find. Only what lies above counts: a loss falls as a run goes on, and a median of what was
before is too high for it rather than too low, so that nothing need be taken off for the trend.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

LEAST = 32
"""Steps before which nothing is called a spike."""

FLOOR = {"loss": 0.02, "grad_norm": 0.2}
"""The smallest deviation that is assumed, as a share of the median: a curve that happens to be flat does not alarm.

With these and 10 deviations, 900 steps of the demo's teacher have one spike (a gradient norm 3.4 times the median), and
three other runs of 760 steps together have none. Small batches do have norms of 3 times the median.
"""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a step.

    Attributes:
        kind: non_finite or spike.
        what: loss or grad_norm.
        value: of it.
        median: of the window; None where a number that is not finite is the finding.
        threshold: what it would have had to stay below; None as above.
    """

    kind: str
    what: str
    value: float
    median: float | None = None
    threshold: float | None = None

    def __str__(self) -> str:
        name = self.what.replace("grad_norm", "gradient norm")
        if self.threshold is None:
            return f"the {name} is {self.value}"
        return f"the {name} is {self.value:.4g}, above {self.threshold:.4g} (median {self.median:.4g})"


class SpikeDetector:
    """The losses and gradient norms of the last steps that were applied. The same on every rank.

    Args:
        window: how many.
        deviations: k.
        scaled: fp16 scales the loss, so that a gradient that is not finite is nothing unusual.
    """

    def __init__(self, *, window: int, deviations: float, scaled: bool = False) -> None:
        self._deviations, self._scaled = deviations, scaled
        self._seen: dict[str, deque[float]] = {what: deque(maxlen=window) for what in FLOOR}
        self._least = min(LEAST, window)

    def finding(self, loss: float, grad_norm: float) -> Finding | None:
        """What is wrong with a step of these numbers, or None."""
        values = {"loss": loss, "grad_norm": grad_norm}
        if self._scaled and not math.isfinite(grad_norm):
            del values["grad_norm"]
        for what, value in values.items():
            if not math.isfinite(value):
                return Finding("non_finite", what, value)
        found = (self._spike(what, value) for what, value in values.items())
        return next((each for each in found if each is not None), None)

    def take(self, loss: float, grad_norm: float) -> None:
        """Takes note of a step that was applied."""
        self._seen["loss"].append(loss)
        self._seen["grad_norm"].append(grad_norm)

    def state(self) -> dict[str, list[float]]:
        """As plain JSON, from which `load` gives the same judge to the last bit."""
        return {what: list(values) for what, values in self._seen.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; of a longer window the last steps are taken."""
        for what, values in self._seen.items():
            values.clear()
            values.extend(state.get(what, ()))

    def _spike(self, what: str, value: float) -> Finding | None:
        seen = self._seen[what]
        if len(seen) < self._least:
            return None
        middle = median(seen)
        deviation = 1.4826 * median(abs(each - middle) for each in seen)
        threshold = middle + self._deviations * max(deviation, FLOOR[what] * abs(middle))
        return Finding("spike", what, value, middle, threshold) if value > threshold else None
