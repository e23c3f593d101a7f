"""Which data of a run is passed over: what a run that went back to a checkpoint does not want to see again.

The data state of a run stays a pure function: step s trains on the samples of data step `data_step(s)`, which is s and
what has been skipped up to there. A run without skips trains on data step s in step s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Skip:
    """From step `at` on, the data lies `steps` data steps further."""

    at: int
    steps: int


@dataclass(frozen=True)
class Skips:
    """All skips of a run, in the order in which they were decided."""

    skips: tuple[Skip, ...] = ()

    def data_step(self, step: int) -> int:
        """Number, from 1, of the data step that a step trains on."""
        return step + sum(skip.steps for skip in self.skips if skip.at <= step)

    def past(self, bad_step: int, *, since: int) -> Skips:
        """With all data passed over that has been seen since a checkpoint, up to and with a bad step.

        Skips since the checkpoint go: their steps are executed again, on data behind what they left out, which lies in
        what is passed over now.

        Args:
            bad_step: a step after the checkpoint, numbered as in this run.
            since: the step after which the checkpoint was written.
        """
        assert since < bad_step, (since, bad_step)
        window = self.data_step(bad_step) - self.data_step(since + 1) + 1
        before = (skip for skip in self.skips if skip.at <= since + 1)
        return Skips((*before, Skip(since + 1, window)))

    def samples(self, step: int, *, per_step: int) -> range:
        """Numbers of the global samples of a step; `per_step` samples are in each."""
        first = (self.data_step(step) - 1) * per_step
        return range(first, first + per_step)

    def plain(self) -> list[list[int]]:
        """As plain JSON: [[at, steps], ...]."""
        return [[skip.at, skip.steps] for skip in self.skips]

    @classmethod
    def of(cls, plain: Iterable[Sequence[int]] | None) -> Skips:
        """From what `plain` gave; none from None."""
        return cls(tuple(Skip(int(at), int(steps)) for at, steps in plain or ()))


NO_SKIPS = Skips()


def skips_of(details: Mapping[str, Any], events: Iterable[Mapping[str, Any]], *, step: float) -> Skips:
    """The skips with which a run goes on after a step: those of its newest order to go back that reaches there.

    An order is in the journal before the next checkpoint knows of it.

    Args:
        details: of the manifest of the checkpoint that is gone on from; may lack them.
        events: rows of the journal, in order.
        step: after which it was written; infinity where all that is known is wanted.
    """
    ordered = [row["skips"] for row in events if row.get("event") == "rollback" and row["step"] <= step]
    return Skips.of(ordered[-1] if ordered else details.get("skips"))
