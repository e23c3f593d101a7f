"""Where the metrics of a run go: `metrics.jsonl`, W&B and any other service, written to as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Sink(Protocol):
    """Takes rows of metrics."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Records a row of a kind: "step", "eval" or "event"."""
        ...


class Sinks:
    """All sinks of this rank; every rank but rank 0 has none.

    Args:
        sinks: each gets every row, in this order.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = tuple(sinks)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Records a row in every sink."""
        for sink in self._sinks:
            sink.write(kind, step, **values)

    def event(self, step: int, **values: Any) -> None:
        """Records a row of the kind "event" in every sink."""
        self.write("event", step, **values)
