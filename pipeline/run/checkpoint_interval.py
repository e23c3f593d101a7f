"""`run.checkpoint_every` "auto": the checkpoint interval that wastes least time, from the measured times of saves.

It is Daly's interval (`pipeline.runtime.goodput.failures.model`) for the mean time between failures of all nodes, but
at least the time of a background save. The first save, which is the first measurement, is due after a minute, since it
costs little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from pipeline.config.sections.run import RunSection
from pipeline.runtime.goodput.failures.model import HOUR, LLAMA_NODE_MTBF_S, best_interval_s
from pipeline.runtime.metrics.journal import read_rows

FIRST_S = 60.0
"""Seconds of training before the first save, which is the first measurement."""
_SAVES = 5
"""Number of newest saves whose median counts: the first save allocates buffers and takes longer."""
_CHANGE = 0.1
"""Relative change below which the interval stays, to keep trivial changes out of the journal."""


@dataclass(frozen=True)
class IntervalDecision:
    """A checkpoint interval and the numbers from which it follows.

    Attributes:
        seconds: seconds of training between two checkpoints.
        blocking_seconds: seconds for which training waits for a save, on the slowest rank; median of the newest saves.
        save_seconds: seconds of a save in the background; median of the newest saves.
        mtbf_seconds: mean time between failures of all nodes.
    """

    seconds: float
    blocking_seconds: float
    save_seconds: float
    mtbf_seconds: float
    nodes: int

    def row(self) -> dict[str, float]:
        """Returns the values of an event in the journal."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"a checkpoint every {self.seconds:.0f} s: training waits {self.blocking_seconds:.3g} s for one, which"
            f" takes {self.save_seconds:.3g} s more; a failure is expected in {self.mtbf_seconds / HOUR:,.1f} h"
            f" on {self.nodes} node{'' if self.nodes == 1 else 's'}"
        )


class AutoInterval:
    """Decides the interval, and adjusts it as saves are measured.

    Args:
        node_mtbf_s: mean time between failures of one node, in seconds.
    """

    def __init__(self, *, node_mtbf_s: float, nodes: int) -> None:
        self._mtbf_s, self._nodes = node_mtbf_s / nodes, nodes
        self._saves: deque[tuple[float, float]] = deque(maxlen=_SAVES)
        self.decision: IntervalDecision | None = None

    @property
    def period_s(self) -> float:
        """Seconds from the beginning of one checkpoint to the next: the interval and the wait for the save."""
        if self.decision is None:
            return FIRST_S
        return self.decision.seconds + self.decision.blocking_seconds

    def measured(self, *, blocking_s: float, save_s: float) -> IntervalDecision | None:
        """Takes the times of a save; returns a decision if it differs by a tenth from the previous one."""
        self._saves.append((blocking_s, save_s))
        blocking, save = (median(times) for times in zip(*self._saves, strict=True))
        best = best_interval_s(mtbf_s=self._mtbf_s, blocking_s=blocking, save_s=save)
        if self.decision is not None and abs(best - self.decision.seconds) <= _CHANGE * self.decision.seconds:
            return None
        self.decision = IntervalDecision(best, blocking, save, self._mtbf_s, self._nodes)
        return self.decision


def make_interval(section: RunSection, *, nodes: int) -> AutoInterval | None:
    """Makes the interval of a run with `checkpoint_every` "auto"; None for other runs.

    Args:
        section: the config's `run`.
    """
    if section.checkpoint_every != "auto":
        return None
    hours = section.node_mtbf_hours
    return AutoInterval(node_mtbf_s=LLAMA_NODE_MTBF_S if hours is None else hours * HOUR, nodes=nodes)


def saves_before(run_dir: Path) -> Iterable[tuple[float, float]]:
    """Yields the times of saves in earlier attempts: (seconds waited, seconds in the background), oldest first."""
    for row in read_rows(run_dir, kind="event"):
        if row["event"] == "checkpoint":
            yield row["waited_seconds"], row["seconds"] - row["waited_seconds"]
