"""Smooths and downsamples a run's metrics for charts. NaN and infinity count as missing."""

from __future__ import annotations

import numpy as np

from pipeline.evaluation.report.runs import Series

POINTS = 600
"""Maximum number of points of a line: about two per three pixels of the widest chart."""

SMOOTHED_SHARE, SMOOTHED_STEPS = 0.02, 301
"""Share of a run's steps over which the smoothed line is a mean, and the most steps: 301 steps leave 6 % of the noise
(1 / sqrt(301)), and more would only blur the initial drop of the loss."""

SETTLED_SHARE = 0.02
"""Share of a run, at its start, whose values may lie above the chart: a loss of ln V would flatten later values."""


def smoothing_window(steps: int) -> int:
    """Window of the moving mean in steps: odd, so that it is centered, and at least 1."""
    return min(int(steps * SMOOTHED_SHARE) // 2 * 2 + 1, SMOOTHED_STEPS)


def smooth(values: Series, *, window: int) -> Series:
    """Centered moving mean, float64 [n] -> [n]; the window is truncated at the ends."""
    present = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(present, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(present)])
    at = np.arange(values.size)
    begin, end = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, values.size)
    return _divide(sums[end] - sums[begin], counts[end] - counts[begin])


def thin(values: Series, *, points: int = POINTS) -> Series:
    """Means of consecutive buckets, float64 [n] -> [min(n, points)]; bucket sizes differ by at most one."""
    if values.size <= points:
        return values
    edges = np.arange(points) * values.size // points
    present = np.isfinite(values)
    return _divide(np.add.reduceat(np.where(present, values, 0.0), edges), np.add.reduceat(present.astype(int), edges))


def settled(values: Series) -> Series:
    """The finite values after the first `SETTLED_SHARE` of a run; all values of a short run."""
    rest = values[int(values.size * SETTLED_SHARE) :]
    return rest[np.isfinite(rest)]


def _divide(sums: Series, counts: Series) -> Series:
    means: Series = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return means
