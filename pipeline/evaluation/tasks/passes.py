"""Assigns requests to forward passes, sorted by length to save padding. No torch.

A pass has at most as many tokens as a micro-batch of training: it fits where training does. All data-parallel ranks
have equally many passes of equal shapes, because collectives need all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_GRAIN = 16
"""Lengths are rounded up to about this many positions: few shapes, with sizes that kernels divide."""


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass of all data-parallel ranks.

    Attributes:
        rows: sequences on each rank.
        length: positions of each.
        requests: numbers of the requests of each rank, at most `rows`; the other rows are padding.
    """

    rows: int
    length: int
    requests: tuple[npt.NDArray[np.int64], ...]


@dataclass(frozen=True)
class PassShape:
    """The size of forward passes.

    Attributes:
        dp: number of data-parallel ranks.
        rows: sequences in a micro-batch.
        length: positions of a sequence, from the config.
        multiple: number that divides the positions of a pass, for tensor and context parallelism.
        fixed: whether every pass has the shape of a micro-batch.
    """

    dp: int
    rows: int
    length: int
    multiple: int = 1
    fixed: bool = False

    def padded(self, length: int) -> int:
        """Positions of a pass for requests of a length."""
        grain = self.multiple * -(-_GRAIN // self.multiple)
        return self.length if self.fixed else min(self.length, -(-length // grain) * grain)

    def rows_of(self, length: int) -> int:
        """Number of sequences in a pass whose sequences have `length` positions."""
        return self.rows if self.fixed else max(1, self.rows * self.length // length)


def forward_passes(lengths: npt.NDArray[np.int64], shape: PassShape) -> list[ForwardPass]:
    """The passes of all requests, the longest first: one too large for memory fails at once.

    Args:
        lengths: int64 [requests], positions of each, at most `shape.length`.
        shape: shape of the passes.
    """
    order = np.argsort(-lengths, kind="stable")
    found, done = list[ForwardPass](), 0
    while done < len(order):
        length = shape.padded(int(lengths[order[done]]))
        mine = order[done : done + shape.dp * shape.rows_of(length)]
        rows = shape.rows if shape.fixed else -(-len(mine) // shape.dp)
        found.append(ForwardPass(rows, length, tuple(mine[rank :: shape.dp] for rank in range(shape.dp))))
        done += len(mine)
    return found


def positions(passes: Sequence[ForwardPass]) -> int:
    """Positions that all ranks compute, padding included."""
    return sum(each.rows * each.length * len(each.requests) for each in passes)
