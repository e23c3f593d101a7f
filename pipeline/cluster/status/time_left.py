"""The estimated rest of a run."""

from __future__ import annotations

from itertools import pairwise

from pipeline.runtime.goodput.metrics import Metrics


def seconds_left(metrics: Metrics, *, steps: int | None) -> float | None:
    """The estimated rest of a run, evaluations and checkpoints included; None where it is not known yet.

    Measured in wall-clock time over the last steps, without breaks of more than ten times the median: restarts.
    """
    recent = list(metrics.recent)
    laps = [later[1] - earlier[1] for earlier, later in pairwise(recent) if later[0] > earlier[0]]
    if steps is None or not laps:
        return None
    median = sorted(laps)[len(laps) // 2]
    kept = [lap for lap in laps if lap <= 10 * median + 1]
    return max(0, steps - int(metrics.step["step"])) * sum(kept) / len(kept)
