"""Spike detector: detects non-finite values and spikes of loss and gradient norm by comparison with previous steps.

A value is a spike when it lies more than k robust deviations above the median of the last steps that were applied. The
deviation is 1.4826 times the median absolute deviation, which for a normal distribution is its standard deviation
(Rousseeuw and Croux 1993, "Alternatives to the Median Absolute Deviation", section 1); unlike the standard deviation it
does not grow with the outliers that it is to find. Only values above the median count. The loss falls during a run, so
the median of previous steps is too high rather than too low, and no correction for the trend is needed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

MIN_STEPS = 32
"""Number of applied steps before spikes are detected."""

MIN_RELATIVE_DEVIATION = {"loss": 0.02, "grad_norm": 0.2}
"""Lower bound of the deviation, as a fraction of the median, against false alarms on a flat curve.

With these bounds and 10 deviations, 900 steps of the demo's teacher have one spike (a gradient norm 3.4 times the
median), and three other runs of 760 steps together have none. Small batches do have norms of 3 times the median.
"""


@dataclass(frozen=True)
class Anomaly:
    """A non-finite value or a spike in a step.

    Attributes:
        kind: non_finite or spike.
        what: loss or grad_norm.
        value: value of the loss or the gradient norm.
        median: median of the window; None for a non-finite value.
        threshold: limit above which a value is a spike; None for a non-finite value.
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


@dataclass(frozen=True)
class SpikeLimits:
    """The values above which a step's loss or gradient norm is a spike.

    Attributes:
        medians: medians of previous steps, by loss and grad_norm; empty while there are too few.
        thresholds: limits above which a value is a spike, by the same names.
        scaled: whether the loss is scaled (fp16): a non-finite gradient norm is then no anomaly.
    """

    medians: Mapping[str, float]
    thresholds: Mapping[str, float]
    scaled: bool

    def check(self, loss: float, grad_norm: float) -> Anomaly | None:
        """Returns the anomaly of a step with these values, or None."""
        values = {"loss": loss, "grad_norm": grad_norm}
        if self.scaled and not math.isfinite(grad_norm):
            del values["grad_norm"]
        for what, value in values.items():
            if not math.isfinite(value):
                return Anomaly("non_finite", what, value)
        for what, value in values.items():
            if value > self.thresholds.get(what, math.inf):
                return Anomaly("spike", what, value, self.medians[what], self.thresholds[what])
        return None


class SpikeDetector:
    """Keeps the losses and gradient norms of the last applied steps, from which the limits of a step follow.

    The limits of step k follow from the steps up to k - 2, even if k - 1 is known: a device that works ahead of the
    host begins k before the host has read the numbers of k - 1. They are the same on every rank.

    Args:
        window: number of steps.
        deviations: number of robust deviations above the median from which a value is a spike.
        scaled: whether the loss is scaled (fp16): a non-finite gradient norm is then no anomaly.
    """

    def __init__(self, *, window: int, deviations: float, scaled: bool = False) -> None:
        self._window, self._deviations, self._scaled = window, deviations, scaled
        self._history: dict[str, deque[float]] = {what: deque(maxlen=window + 1) for what in MIN_RELATIVE_DEVIATION}
        self._newest = 0
        """The step of the newest values."""
        self._min_steps = min(MIN_STEPS, window)

    def limits(self, step: int) -> SpikeLimits:
        """Returns the limits of a step later than all added steps."""
        known = -1 if self._newest == step - 1 else None
        found = {what: self._limit(what, list(values)[:known]) for what, values in self._history.items()}
        present = {what: limit for what, limit in found.items() if limit is not None}
        medians, thresholds = ({what: limit[i] for what, limit in present.items()} for i in (0, 1))
        return SpikeLimits(medians, thresholds, self._scaled)

    def add(self, step: int, loss: float, grad_norm: float) -> None:
        """Adds a step that was applied."""
        self._newest = step
        self._history["loss"].append(loss)
        self._history["grad_norm"].append(grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain JSON; `load_state_dict` restores it exactly."""
        return {**{what: list(values) for what, values in self._history.items()}, "newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state; from a state with a longer window it uses the last steps."""
        self._newest = state.get("newest", 0)
        for what, values in self._history.items():
            values.clear()
            values.extend(state.get(what, ()))

    def _limit(self, what: str, values: list[float]) -> tuple[float, float] | None:
        """Returns median and threshold; None with too few values."""
        values = values[-self._window :]
        if len(values) < self._min_steps:
            return None
        center = median(values)
        deviation = 1.4826 * median(abs(each - center) for each in values)
        return center, center + self._deviations * max(deviation, MIN_RELATIVE_DEVIATION[what] * abs(center))
